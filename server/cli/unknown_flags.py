"""The command line's flags, and what to do instead of those that Quire does not have."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from quire.engine import advice


def dashed(argv: Sequence[str]) -> list[str]:
    """Arguments with dashes for underscores in flags: --max_model_len means --max-model-len, as in vLLM."""
    parts = [each.partition("=") for each in argv]
    return [(name.replace("_", "-") if name.startswith("--") else name) + rest + value for name, rest, value in parts]


def parse_known(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; exits with status 2 where one is unknown."""
    args, unknown = parser.parse_known_args(dashed(argv))
    if unknown:
        parser.exit(2, f"{parser.prog}: {unknown_arguments(unknown, parser._option_string_actions)}")
    return args


def unknown_arguments(unknown: Sequence[str], known: Iterable[str]) -> str:
    """A line for each unknown flag, with what to do instead."""
    flags, names = [each.partition("=")[0] for each in unknown if each.startswith("-")], list(known)
    said = [f"  {flag}: {advice.on_flag(flag, names) or 'not known; see --help'}\n" for flag in dict.fromkeys(flags)]
    return "cannot be understood:\n" + ("".join(said) or f"  {' '.join(unknown)}: one argument too many\n")
