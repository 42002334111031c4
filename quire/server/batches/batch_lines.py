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

from quire.engine.common import random_source
from quire.engine.common.errors import ConfigError, InvalidRequest
from quire.server.encoding import encode_ascii_json
from quire.server.protocol.stored_objects import BATCH_ENDPOINTS


class _LineEntry(msgspec.Struct):
    """Each field accepts any JSON type, so that the error messages are Quire's own."""

    custom_id: Any = None
    method: Any = "POST"
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


class _RequestFlags(msgspec.Struct):
    stream: Any = None
    background: Any = None


@dataclass(frozen=True, slots=True)
class LineRequest:
    custom_id: str
    url: str
    body: bytes


def parse_line(line: str | bytes) -> LineRequest:
    """Raises InvalidRequest."""
    try:
        entry = msgspec.json.decode(line, type=_LineEntry)
    except msgspec.ValidationError:
        entry = _LineEntry()
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"not JSON: {error}", param="line") from None
    if not isinstance(entry.custom_id, str):
        raise InvalidRequest("custom_id must be a string", param="custom_id")
    if entry.method != "POST":
        raise InvalidRequest(f"method must be POST, got {entry.method!r:.100}", param="method")
    if entry.url not in BATCH_ENDPOINTS:
        raise InvalidRequest(f"url must be one of {', '.join(BATCH_ENDPOINTS)}, got {entry.url!r:.100}", param="url")
    try:
        body = msgspec.json.decode(entry.body, type=_RequestFlags)
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequest("body must be an object", param="body") from None
    for name in ("stream", "background"):
        if getattr(body, name):
            raise InvalidRequest(f"{name} has no meaning in a batch", param=name)
    return LineRequest(entry.custom_id, entry.url, bytes(entry.body))


def encode_answer_line(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    answer = b'{"status_code":%d,"request_id":%b,"body":%b}' % (status, encode_ascii_json(request_id), body)
    return _encode_result_line(custom_id, answer, b"null")


def encode_error_line(custom_id: str, code: str, message: str, param: str | None = None) -> bytes:
    return _encode_result_line(
        custom_id, b"null", encode_ascii_json({"code": code, "message": message, "param": param})
    )


def _encode_result_line(custom_id: str, response: bytes, error: bytes) -> bytes:
    # ASCII, because custom_id may contain an unpaired surrogate.
    head = b'{"id":"batch_req_%b","custom_id":%b' % (random_source.uuid_hex().encode(), encode_ascii_json(custom_id))
    return b'%b,"response":%b,"error":%b}' % (head, response, error)


def custom_id_or_line_name(line_number: int, line: str) -> str:
    try:
        value = json.loads(line)["custom_id"]
    except (ValueError, KeyError, TypeError):
        value = None
    return value if isinstance(value, str) else f"line-{line_number}"


def read_nonempty_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbers begin at 1 and count empty lines."""
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())


def read_line_numbers_by_custom_id(path: Path) -> dict[str, int]:
    """Maps each custom_id to its first line. Raises ConfigError."""
    line_numbers: dict[str, int] = {}
    try:
        for number, line in read_nonempty_lines(path):
            line_numbers.setdefault(custom_id_or_line_name(number, line), number)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    return line_numbers


def find_duplicate_lines(path: Path, line_numbers: Mapping[str, int]) -> set[int]:
    return {
        number
        for number, line in read_nonempty_lines(path)
        if line_numbers[custom_id_or_line_name(number, line)] != number
    }


@contextmanager
def rereadable_file(path: Path) -> Iterator[Path]:
    """If `path` is a pipe or stdin (`-`), yields a temporary copy that can be read repeatedly."""
    if str(path) != "-" and not path.is_fifo():
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="quire-run-", suffix=".jsonl") as copy:
        with nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb") as source:
            shutil.copyfileobj(source, copy)
        copy.flush()
        yield Path(copy.name)
