"""What to write instead of a setting that is not there, for users who mistype one or bring vLLM's or llama.cpp's."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

_TELLING = 3
"""Letters of an abbreviation that may tell what is meant."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean …?`, or "" where no known name is near, nor just one begins with it."""
    names = list(known)
    longer = [each for each in names if each.startswith(name)] if len(name.strip("-")) >= _TELLING else []
    near = get_close_matches(name, names, 1, 0.75) or (longer if len(longer) == 1 else [])
    return f"did you mean {near[0]}?" if near else ""


def foreign_flags() -> dict[str, str]:
    """What to do instead of flags of other servers, by flag without its dashes; from advice.toml."""
    return {
        flag.rstrip("="): text
        for section in _read().values()
        for text, flags in section.items()
        for flag in flags.split()
    }


def without_effect() -> dict[str, tuple[str, bool]]:
    """Those of them that may be given: why they change nothing, and whether a value follows."""
    found = [(flag, why) for why, flags in _read()["without_effect"].items() for flag in flags.split()]
    return {flag.rstrip("="): (why, flag.endswith("=")) for flag, why in found}


def _read() -> dict[str, dict[str, str]]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def on_flag(flag: str, known: Iterable[str]) -> str:
    """What to do instead of `flag`; "" where nothing is known of it. `known`: flags that are there, with dashes."""
    return foreign_flags().get(flag.lstrip("-")) or nearest(flag, known)


def on_setting(name: str, known: Iterable[str]) -> str:
    """The same for a name as Python, TOML files and variables write it: `max_model_len`."""
    foreign = foreign_flags().get(name.replace("_", "-"), "")
    return re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), foreign) or nearest(name, known)
