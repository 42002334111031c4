"""The command line's flags, and what to do instead of those that Quire does not have."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Container, Iterable, Sequence

from quire.engine import advice


def dashed(argv: Sequence[str]) -> list[str]:
    """Arguments with dashes for underscores in flags: --max_model_len means --max-model-len, as in vLLM."""
    parts = [each.partition("=") for each in argv]
    return [(name.replace("_", "-") if name.startswith("--") else name) + rest + value for name, rest, value in parts]


def parse_known(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; exits with status 2 where one is unknown. Flags that change nothing are told, and left out."""
    known = parser._option_string_actions
    args, unknown = parser.parse_known_args(_effective(parser, [_renamed(each, known) for each in dashed(argv)]))
    if unknown:
        parser.exit(2, f"{parser.prog}: {unknown_arguments(unknown, known)}")
    return args


def _renamed(argument: str, known: Container[str]) -> str:
    """With our flag for another server's that means the same, where the command has it."""
    flag, equals, value = argument.partition("=")
    if not flag.startswith("-") or flag in known:
        return argument
    ours = f"--{advice.other_names().get(flag.lstrip('-'))}"
    return ours + equals + value if ours in known else argument


def _effective(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """The arguments without foreign flags that change nothing, and their values; these are told on standard error."""
    known, rest = parser._option_string_actions, list(argv)
    kept: list[str] = []
    needless: dict[str, str] = {}
    while rest:
        argument = rest.pop(0)
        flag, given, value = argument.partition("=")
        if flag in known and (why := advice.needless_value(flag.lstrip("-"), value if given else (rest or [""])[0])):
            needless[flag] = why
            del rest[: not given]
            continue
        if not flag.startswith("-") or flag in known or flag == "--":
            kept.append(argument)
            continue
        level = re.fullmatch(r"-O\d", flag)  # -O3; and --compilation-config.mode 3
        foreign = advice.foreign_flag("O" if level else flag.lstrip("-").partition(".")[0])
        values = [value] if given else []
        if foreign is not None and not given and not level:
            values = _values(rest, foreign.takes)
        if foreign is not None and (why := foreign.needless(" ".join(values))):
            needless[flag] = why
        else:
            kept.append(flag if foreign else argument)
    if needless:
        print(f"{parser.prog}: {advice.summed_up(needless)}", file=sys.stderr)
    return kept


def _values(rest: list[str], takes: str) -> list[str]:
    """Take the values of a flag from the beginning of `rest`; `takes` is as in `advice.Foreign`."""
    values: list[str] = []
    while takes and rest and not rest[0].startswith("--") and (takes == "+" or not values):
        values.append(rest.pop(0))
    return values


def unknown_arguments(unknown: Sequence[str], known: Iterable[str]) -> str:
    """A line for each unknown flag, with what to do instead."""
    flags, names = [each.partition("=")[0] for each in unknown if each.startswith("-")], list(known)
    said = [f"  {flag}: {advice.on_flag(flag, names) or 'not known; see --help'}\n" for flag in dict.fromkeys(flags)]
    return "cannot be understood:\n" + ("".join(said) or f"  {' '.join(unknown)}: one argument too many\n")
