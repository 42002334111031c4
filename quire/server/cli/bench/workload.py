from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from quire.engine.common.errors import ConfigError
from quire.server.cli.flags import FlagGroup
from quire.server.cli.settings_flags import bounded_number

FIRST_TOKEN_ID = 10
"""Smaller ids are often special tokens."""


_COUNT_FLAGS = (
    ("--num-requests --num-prompts --num-prompt", 32, 1, "requests to measure"),
    ("--input-len --random-input-len --random-input", 128, 1, "random tokens per prompt"),
    ("--output-len --random-output-len --random-output", 64, 1, "tokens per answer"),
    ("--shared-prefix", 0, 0, "tokens that all random prompts begin with"),
    ("--vocab", 4000, FIRST_TOKEN_ID + 1, "random token ids are below this"),
    ("--warmup --num-warmups", 2, 0, "short warm-up requests that are not measured"),
    ("--seed", 0, 0, "seed of prompts and arrivals"),
)
WORKLOAD_FLAGS = {
    "load": FlagGroup(
        {
            names: {"type": bounded_number(int, low), "default": default, "metavar": "N", "help": f"{text} ({default})"}
            for names, default, low, text in _COUNT_FLAGS
        }
        | {
            "--temperature": {
                "type": bounded_number(float, 0),
                "default": 0.0,
                "metavar": "NUMBER",
                "help": "sampling temperature; 0 is greedy (0)",
            }
        }
    )
}


def check_shared_prefix_length(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.shared_prefix > args.input_len:
        parser.error(f"argument --shared-prefix: longer than --input-len, {args.shared_prefix} > {args.input_len}")


def random_lengths(args: argparse.Namespace, length: int, count: int) -> list[int]:
    ratio = getattr(args, "random_range_ratio", 0.0)
    if not ratio:
        return [length] * count
    rng = random.Random(args.seed + length)
    return [rng.randint(max(1, int(length * (1 - ratio))), max(1, int(length * (1 + ratio)))) for _ in range(count)]


def random_prompts_and_warmup(args: argparse.Namespace, vocab: int) -> tuple[list[list[int]], list[list[int]]]:
    """The measured prompts and the warm-up prompts share only the common prefix."""
    rng = random.Random(args.seed)

    def random_ids(count: int) -> list[int]:
        return [rng.randrange(FIRST_TOKEN_ID, vocab) for _ in range(count)]

    shared = random_ids(args.shared_prefix)
    own_lengths = random_lengths(args, args.input_len - args.shared_prefix, args.num_requests)
    measured = [shared + random_ids(length) for length in own_lengths]
    return measured, [shared + random_ids(args.input_len - args.shared_prefix) for _ in range(args.warmup)]


def read_jsonl_prompts(path: Path) -> list[dict[str, Any]]:
    """Each line has `prompt` or `messages`. Its other fields are added to the request. Raises ConfigError."""
    entries = []
    try:
        for line_number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            entry = json.loads(line)
            if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
                raise ConfigError(f"{path}, line {line_number}: must be an object with either prompt or messages")
            entries.append(entry)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}, line {line_number}: not JSON: {error}") from None
    if not entries:
        raise ConfigError(f"{path} holds no prompts")
    return entries
