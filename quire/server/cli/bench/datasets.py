"""Prompts from ShareGPT's conversations, or JSON lines like vLLM's dataset `custom`."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from quire.engine.common.errors import ConfigError

_MIN_TOKENS = 4
_MAX_PROMPT_TOKENS = 1024
_MAX_TOTAL_TOKENS = 2048
"""vLLM's limit of a prompt together with its answer, so that figures are comparable."""
_CHARACTERS_PER_TOKEN = 4
"""Assumed if the server does not count tokens."""


def read_dataset(args: argparse.Namespace, count_tokens: Callable[[str], int]) -> list[dict[str, Any]]:
    """Raises ConfigError."""
    if args.dataset_name == "custom":
        return _read_custom(args.dataset_path, args.dataset_output_len or args.output_len, chats=args.chats)
    return _read_sharegpt(args, count_tokens)


def _read_custom(path: Path, length: int, *, chats: bool) -> list[dict[str, Any]]:
    entries = []
    for number, line in enumerate(_read_utf8_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt = entry["prompt"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(f"{path}, line {number}: must be an object with a prompt") from None
        entries.append(_request_body(prompt, int(entry.get("output_tokens") or length), chats=chats))
    if not entries:
        raise ConfigError(f"{path} holds no prompts")
    return entries


def _read_sharegpt(args: argparse.Namespace, count_tokens: Callable[[str], int]) -> list[dict[str, Any]]:
    path = args.dataset_path
    try:
        content = json.loads(_read_utf8_text(path))
        if not isinstance(content, list):
            raise TypeError(type(content))
        pairs = [pair for each in content if (pair := _first_turns(each)) is not None]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"{path}: must be a JSON list of ShareGPT's objects with conversations") from None
    random.Random(args.seed).shuffle(pairs)
    entries: list[dict[str, Any]] = []
    for prompt, answer in pairs:
        if len(entries) >= args.num_requests:
            break
        prompt_tokens = count_tokens(prompt)
        length = args.dataset_output_len or count_tokens(answer)
        if (
            prompt_tokens < _MIN_TOKENS
            or prompt_tokens > _MAX_PROMPT_TOKENS
            or prompt_tokens + length > _MAX_TOTAL_TOKENS
        ):
            continue
        if args.dataset_output_len is None and length < _MIN_TOKENS:
            continue
        entries.append(_request_body(prompt, length, chats=args.chats))
    if not entries:
        raise ConfigError(f"{path} holds no conversations of {_MIN_TOKENS} to {_MAX_PROMPT_TOKENS} tokens")
    return entries


def _first_turns(entry: dict[str, Any]) -> tuple[str, str] | None:
    turns = entry.get("conversations", entry.get("conversation"))
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    return str(turns[0]["value"]), str(turns[1]["value"])


def count_tokens_by_server(http: httpx.Client, model: str, text: str) -> int:
    try:
        answer = http.post("../tokenize", json={"model": model, "prompt": text})
        return int(answer.json()["count"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return max(1, len(text) // _CHARACTERS_PER_TOKEN)


def _request_body(prompt: str, length: int, *, chats: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chats else {"prompt": prompt}
    return content | {"max_tokens": length}


def _read_utf8_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"cannot read {path}: {why}") from None
