"""`quire run-batch`: `quire run FILE.jsonl -o OUT.jsonl` with vLLM's name and flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.server.cli.flags import REQUEST_FILE_FLAGS
from quire.server.cli.run import build_request_file_parser, run_request_file
from quire.server.cli.settings_flags import parse_settings
from quire.server.config import ServerConfig

_IGNORED_FLAGS = {
    "--output-tmp-dir": 1,
    "--response-role": 1,
    "--enable-metrics": 0,
    "--host": 1,
    "--port": 1,
    "--url": 1,
}
"""Values are the number of a flag's arguments."""


def main(argv: Sequence[str], started: float) -> int:
    flags: dict[str, Any] = {
        "file": {"nargs": "?", "type": _local_path, "help": argparse.SUPPRESS},
        "-i --input-file": {
            "metavar": "FILE.jsonl",
            "type": _local_path,
            "help": "file with one request per line; - is stdin",
        },
        "-o --output --output-file": {**REQUEST_FILE_FLAGS["-o --output"], "type": _local_path},
        **{names: spec for names, spec in REQUEST_FILE_FLAGS.items() if names != "-o --output"},
    }
    usage = "quire run-batch -i FILE.jsonl -o OUT.jsonl [--model MODEL] [--resume] [flags]"
    parser = build_request_file_parser("quire run-batch", usage, flags)
    args, config = parse_settings(parser, drop_ignored_flags(argv), ServerConfig)
    args.file = args.file or args.input_file
    if args.file is None:
        parser.error("the following arguments are required: -i/--input-file")
    return run_request_file(parser, args, config, started)


def _local_path(text: str) -> Path:
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text} is not a local file: download it first, and upload the results yourself"
        )
    return Path(text)


def drop_ignored_flags(argv: Sequence[str]) -> list[str]:
    rest, arguments = list(argv), []
    while rest:
        argument = rest.pop(0)
        flag, equals, _ = argument.partition("=")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        if flag in _IGNORED_FLAGS:
            del rest[: _IGNORED_FLAGS[flag] * (not equals)]
        else:
            arguments.append(argument)
    return arguments
