from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REQUEST_FILE_FLAGS: dict[str, Any] = {
    "-o --output": {
        "metavar": "OUT.jsonl",
        "type": Path,
        "help": "file for the results, one per line; - is stdout",
    },
    "--resume": {
        "action": "store_true",
        "help": "keep the results in OUT.jsonl, and run only requests that are missing or may succeed now",
    },
    "--retry-refused": {
        "action": "store_true",
        "help": "with --resume, also retry requests that were refused for good",
    },
    "--concurrency": {
        "type": int,
        "metavar": "N",
        "help": "number of requests at once (default: --max-num-seqs)",
    },
    "--served-model-name": {
        "nargs": "+",
        "metavar": "TEXT",
        "default": argparse.SUPPRESS,
        "help": "names that the requests may use for the model",
    },
}
"""Flags of `quire run FILE.jsonl -o OUT.jsonl`."""


class ExclusiveFlags(dict[str, Any]): ...


class FlagGroup(dict[str, Any]): ...


def build_parser(
    program: str | None, description: str | None, flags: Mapping[str, Any], **parser_options: Any
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=description, **{"allow_abbrev": False} | parser_options)
    add_flag_table(parser, flags)
    return parser


def add_flag_table(parser: Any, flags: Mapping[str, Any]) -> None:
    """`flags` maps names, separated by spaces, to a default, a type, False for a switch, or arguments of add_argument.
    The key of a FlagGroup is its title.
    """
    for names, spec in flags.items():
        if isinstance(spec, ExclusiveFlags):
            add_flag_table(parser.add_mutually_exclusive_group(), spec)
        elif isinstance(spec, FlagGroup):
            add_flag_table(parser.add_argument_group(names), spec)
        else:
            parser.add_argument(*names.split(), **_argparse_kwargs(spec))


def _argparse_kwargs(spec: Any) -> dict[str, Any]:
    if isinstance(spec, type):
        return {"type": spec}
    if isinstance(spec, bool):
        return {"action": "store_true"}
    settings: dict[str, Any] = dict(spec) if isinstance(spec, Mapping) else {"default": spec}
    default = settings.get("default")
    value = default[0] if isinstance(default, list | tuple) and default else default
    if isinstance(value, int | float | Path):
        settings.setdefault("type", type(value))
    return settings
