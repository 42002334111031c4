"""Prompts of benchmarks' files: ShareGPT's conversations, and lines of JSON as vLLM's dataset `custom`."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from quire.engine.errors import ConfigError

_LEAST, _LONGEST, _LONGEST_TOGETHER = 4, 1024, 2048
"""Tokens of a prompt, and of prompt and answer together: vLLM's bounds, so that figures compare."""
_CHARACTERS = 4
"""Of a token, where nobody counts them."""


def read_dataset(args: argparse.Namespace, count: Callable[[str], int]) -> list[dict[str, Any]]:
    """What is to be asked, at most --num-requests, with the length of each answer. `count`: tokens of a text. Raises
    ConfigError."""
    if args.dataset_name == "custom":
        return _custom(args.dataset_path, args.dataset_output_len or args.output_len, chats=args.chats)
    return _sharegpt(args, count)


def _custom(path: Path, length: int, *, chats: bool) -> list[dict[str, Any]]:
    found = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt = entry["prompt"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(f"{path}, line {number}: must be an object with a prompt") from None
        found.append(_asked(prompt, int(entry.get("output_tokens") or length), chats=chats))
    if not found:
        raise ConfigError(f"{path} holds no prompts")
    return found


def _sharegpt(args: argparse.Namespace, count: Callable[[str], int]) -> list[dict[str, Any]]:
    path = args.dataset_path
    try:
        content = json.loads(_text(path))
        if not isinstance(content, list):
            raise TypeError(type(content))
        pairs = [pair for each in content if (pair := _first_turns(each)) is not None]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"{path}: must be a JSON list of ShareGPT's objects with conversations") from None
    random.Random(args.seed).shuffle(pairs)
    found: list[dict[str, Any]] = []
    for prompt, answer in pairs:
        if len(found) >= args.num_requests:
            break
        asked = count(prompt)
        length = args.dataset_output_len or count(answer)
        if asked < _LEAST or asked > _LONGEST or asked + length > _LONGEST_TOGETHER:
            continue
        if args.dataset_output_len is None and length < _LEAST:
            continue
        found.append(_asked(prompt, length, chats=args.chats))
    if not found:
        raise ConfigError(f"{path} holds no conversations of {_LEAST} to {_LONGEST} tokens")
    return found


def _first_turns(entry: dict[str, Any]) -> tuple[str, str] | None:
    """What a person asked first, and the answer; None where there are no two turns."""
    turns = entry.get("conversations", entry.get("conversation"))
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    return str(turns[0]["value"]), str(turns[1]["value"])


def tokens_at(http: httpx.Client, model: str, text: str) -> int:
    """How many a text has, as the server counts them; a guess where it does not. The client's base is its /v1."""
    try:
        answer = http.post("../tokenize", json={"model": model, "prompt": text})
        return int(answer.json()["count"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return max(1, len(text) // _CHARACTERS)


def _asked(prompt: str, length: int, *, chats: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chats else {"prompt": prompt}
    return content | {"max_tokens": length}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"cannot read {path}: {why}") from None
