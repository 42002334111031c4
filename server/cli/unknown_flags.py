"""Advice on flags that Quire does not have, for users who bring commands of vLLM and llama.cpp."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path


def dashed(argv: Sequence[str]) -> list[str]:
    """Arguments with dashes for underscores in flags: --max_model_len means --max-model-len, as in vLLM."""
    parts = [each.partition("=") for each in argv]
    return [(name.replace("_", "-") if name.startswith("--") else name) + rest + value for name, rest, value in parts]


def unknown_arguments(unknown: Sequence[str], known: Iterable[str]) -> str:
    """An error text: a line for each unknown flag, with what to do instead."""
    flags = [each.partition("=")[0] for each in unknown if each.startswith("-")]
    said = [f"  {flag}: {_advice(flag, list(known))}\n" for flag in dict.fromkeys(flags)]
    return "cannot be understood:\n" + ("".join(said) or f"  {' '.join(unknown)}: one argument too many\n")


def advice() -> dict[str, str]:
    """What to do instead, by flag; from unknown_flags.toml."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {flag: text for text, flags in table.items() for flag in flags.split()}


def _advice(flag: str, known: Sequence[str]) -> str:
    near = get_close_matches(flag, known, 1, 0.75)
    return advice().get(flag.lstrip("-")) or (f"did you mean {near[0]}?" if near else "not known; --help lists all")
