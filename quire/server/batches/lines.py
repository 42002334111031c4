"""Files in OpenAI's batch format: a request on each line, and then a result on each."""

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

import msgspec

from quire.engine import random_source
from quire.engine.errors import ConfigError, InvalidRequest
from quire.server.encoding import encode_ascii
from quire.server.protocol.kept import URLS


class _Entry(msgspec.Struct):
    """Fields of any type, so that each is refused in our words."""

    custom_id: Any = None
    method: Any = "POST"
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Body(msgspec.Struct):
    stream: Any = None
    background: Any = None


@dataclass(frozen=True, slots=True)
class Job:
    """One line of the input."""

    custom_id: str
    url: str
    body: bytes
    """A JSON object."""


def parse_line(line: str | bytes) -> Job:
    """Parse a line of the input. Raises InvalidRequest."""
    try:
        entry = msgspec.json.decode(line, type=_Entry)
    except msgspec.ValidationError:
        entry = _Entry()
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"not JSON: {error}", param="line") from None
    if not isinstance(entry.custom_id, str):
        raise InvalidRequest("custom_id must be a string", param="custom_id")
    if entry.method != "POST":
        raise InvalidRequest(f"method must be POST, got {entry.method!r:.100}", param="method")
    if entry.url not in URLS:
        raise InvalidRequest(f"url must be one of {', '.join(URLS)}, got {entry.url!r:.100}", param="url")
    try:
        body = msgspec.json.decode(entry.body, type=_Body)
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequest("body must be an object", param="body") from None
    for name in ("stream", "background"):
        if getattr(body, name):
            raise InvalidRequest(f"{name} has no meaning in a batch", param=name)
    return Job(entry.custom_id, entry.url, bytes(entry.body))


def answered_line(name: str, status: int, request_id: str, body: bytes) -> bytes:
    """A line of a batch's output. `body`: the answer, JSON."""
    answer = b'{"status_code":%d,"request_id":%b,"body":%b}' % (status, encode_ascii(request_id), body)
    return _result(name, answer, b"null")


def failed_line(name: str, code: str, message: str, param: str | None = None) -> bytes:
    """One for a request that was never answered."""
    return _result(name, b"null", encode_ascii({"code": code, "message": message, "param": param}))


def _result(name: str, response: bytes, error: bytes) -> bytes:
    # ASCII, for a custom_id may have half a surrogate pair
    head = b'{"id":"batch_req_%b","custom_id":%b' % (random_source.uuid_hex().encode(), encode_ascii(name))
    return b'%b,"response":%b,"error":%b}' % (head, response, error)


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
