"""The input of `quire run`: a request in OpenAI's batch format on each line."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.engine.errors import ConfigError, InvalidRequest

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/rerank", "/classify", "/pooling"),
)


@dataclass(frozen=True, slots=True)
class Job:
    """One line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]


def parse_line(line: str) -> Job:
    """Parse a line of the input. Raises InvalidRequest."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"not JSON: {error}", param="line") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("custom_id"), str):
        raise InvalidRequest("custom_id must be a string", param="custom_id")
    if entry.get("method", "POST") != "POST":
        raise InvalidRequest(f"method must be POST, got {entry['method']!r}", param="method")
    if entry.get("url") not in URLS:
        raise InvalidRequest(f"url must be one of {', '.join(URLS)}, got {entry.get('url')!r}", param="url")
    body = entry.get("body")
    if not isinstance(body, dict):
        raise InvalidRequest("body must be an object", param="body")
    if body.get("stream"):
        raise InvalidRequest("stream has no meaning in a batch", param="stream")
    return Job(entry["custom_id"], entry["url"], body)


def custom_id(number: int, line: str) -> str:
    """The line's custom_id; made from its number in the file if it has none."""
    try:
        given = json.loads(line)["custom_id"]
    except (ValueError, KeyError, TypeError):
        given = None
    return given if isinstance(given, str) else f"line-{number}"


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """The numbers and texts of a file's non-empty lines."""
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())


def ids_in(path: Path) -> dict[str, int]:
    """The custom_ids of an input file, each with the number of its first line. Raises ConfigError."""
    places: dict[str, int] = {}
    try:
        for number, line in lines_of(path):
            places.setdefault(custom_id(number, line), number)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    return places


def duplicates_in(path: Path, places: Mapping[str, int]) -> set[int]:
    """Numbers of the lines whose custom_id an earlier line has: each of them fails, as `line-NUMBER`."""
    return {number for number, line in lines_of(path) if places[custom_id(number, line)] != number}


@contextmanager
def readable_twice(path: Path) -> Iterator[Path]:
    """The file, or a copy of what comes from a pipe or, for `-`, from stdin."""
    if str(path) != "-" and not path.is_fifo():
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="quire-run-", suffix=".jsonl") as kept:
        with nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb") as given:
            shutil.copyfileobj(given, kept)
        kept.flush()
        yield Path(kept.name)
