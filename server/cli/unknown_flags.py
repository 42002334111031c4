"""The command line's flags, and what to do instead of those that Quire does not have."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Container, Iterable, Sequence

from quire.engine import advice


def dashed(argv: Sequence[str]) -> list[str]:
    """Arguments with dashes for underscores in flags: --max_model_len means --max-model-len, as in vLLM."""
    parts = [each.partition("=") for each in argv]
    return [(name.replace("_", "-") if name.startswith("--") else name) + rest + value for name, rest, value in parts]


OTHER_NAMES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
    "--num-gpu-blocks-override": "--num-kv-blocks",
    "--disable-uvicorn-access-log": "--disable-access-log",
    "--alias": "--served-model-name",
    "--parallel": "--max-num-seqs",
}
"""vLLM's and llama.cpp's, of flags that mean the same here."""


def parse_known(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; exits with status 2 where one is unknown. Flags that change nothing are told, and left out."""
    known = parser._option_string_actions
    args, unknown = parser.parse_known_args(_effective(parser, [_renamed(each, known) for each in dashed(argv)]))
    if unknown:
        parser.exit(2, f"{parser.prog}: {unknown_arguments(unknown, known)}")
    return args


def _renamed(argument: str, known: Container[str]) -> str:
    flag, equals, value = argument.partition("=")
    ours = OTHER_NAMES.get(flag)
    return argument if ours is None or flag in known or ours not in known else ours + equals + value


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
