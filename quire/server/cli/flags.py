"""The command line of a program, from a table of its flags."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class OneOf(dict[str, Any]):
    """Flags that exclude each other."""


class Group(dict[str, Any]):
    """Flags that --help shows under a title, by which they stand in the table."""


def command(
    program: str | None, description: str | None, flags: Mapping[str, Any], **more: Any
) -> argparse.ArgumentParser:
    """A parser of these flags. `more`: other arguments of ArgumentParser."""
    parser = argparse.ArgumentParser(prog=program, description=description, **{"allow_abbrev": False} | more)
    add(parser, flags)
    return parser


def add(parser: Any, flags: Mapping[str, Any]) -> None:
    """Add flags to argparse's parser, or to a group of one. `flags`: by the names of each flag or argument its default,
    or what argparse's add_argument takes; False: a flag without a value; a type: an argument of this type; OneOf, by
    any name; Group, by its title."""
    for names, given in flags.items():
        if isinstance(given, OneOf):
            add(parser.add_mutually_exclusive_group(), given)
        elif isinstance(given, Group):
            add(parser.add_argument_group(names), given)
        else:
            parser.add_argument(*names.split(), **_settings(given))


def _settings(given: Any) -> dict[str, Any]:
    if isinstance(given, type):
        return {"type": given}
    if isinstance(given, bool):
        return {"action": "store_true"}
    settings: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"default": given}
    default = settings.get("default")
    value = default[0] if isinstance(default, list | tuple) and default else default
    if isinstance(value, int | float | Path):
        settings.setdefault("type", type(value))
    return settings
