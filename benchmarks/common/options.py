"""The command line of a program, from a table of its flags."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NUMBERS = (int, float)


def options(description: str | None, flags: Mapping[str, Any], program: str | None = None) -> argparse.Namespace:
    """Read the command line. `flags`: by the name of each flag or argument its default, or what argparse's
    add_argument takes; False: a flag without a value; a type: an argument of this type."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=program, description=description, formatter_class=formatter)
    for name, given in flags.items():
        parser.add_argument(name, **settings_of(given))
    return parser.parse_args()


def settings_of(given: Any) -> dict[str, Any]:
    if isinstance(given, type):
        return {"type": given}
    if isinstance(given, bool):
        return {"action": "store_true"}
    settings: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"default": given}
    default = settings.get("default")
    value = default[0] if isinstance(default, list | tuple) and default else default
    if isinstance(value, (*NUMBERS, Path)):
        settings.setdefault("type", type(value))
    return settings
