"""The command line's flags, and what to do instead of those that Quire does not have."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

from quire.engine import advice


def dashed(argv: Sequence[str]) -> list[str]:
    """Arguments with dashes for underscores in flags: --max_model_len means --max-model-len, as in vLLM."""
    parts = [each.partition("=") for each in argv]
    return [(name.replace("_", "-") if name.startswith("--") else name) + rest + value for name, rest, value in parts]


SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"}
"""vLLM's short names."""


def parse_known(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; exits with status 2 where one is unknown. Flags that change nothing are told, and left out."""
    known = parser._option_string_actions
    argv = [SHORT.get(each, each) if SHORT.get(each) in known else each for each in dashed(argv)]
    args, unknown = parser.parse_known_args(_effective(parser, argv))
    if unknown:
        parser.exit(2, f"{parser.prog}: {unknown_arguments(unknown, known)}")
    return args


def _effective(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """The arguments without foreign flags that change nothing, and their values; each is told on standard error."""
    known, left = parser._option_string_actions, iter(argv)
    kept: list[str] = []
    table = None
    for each in left:
        flag, given, _ = each.partition("=")
        if not flag.startswith("-") or flag in known or flag == "--":
            kept.append(each)
            continue
        table = advice.without_effect() if table is None else table
        why, takes_value = table.get(flag.lstrip("-"), ("", False))
        if not why:
            kept.append(each)
            continue
        print(f"{parser.prog}: {flag} changes nothing: {why}", file=sys.stderr)
        if takes_value and not given:
            next(left, None)
    return kept


def unknown_arguments(unknown: Sequence[str], known: Iterable[str]) -> str:
    """A line for each unknown flag, with what to do instead."""
    flags, names = [each.partition("=")[0] for each in unknown if each.startswith("-")], list(known)
    said = [f"  {flag}: {advice.on_flag(flag, names) or 'not known; see --help'}\n" for flag in dict.fromkeys(flags)]
    return "cannot be understood:\n" + ("".join(said) or f"  {' '.join(unknown)}: one argument too many\n")
