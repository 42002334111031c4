from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Container, Iterator
from pathlib import Path
from typing import BinaryIO

from quire.engine.common.errors import InvalidRequest
from quire.server.batches.batch_lines import LineRequest, parse_line
from quire.server.formats.tools.strict_json import is_encodable
from quire.server.store.batches import BatchError, BatchLine

MAX_LINES = 50_000
"""OpenAI's limit."""
MAX_CUSTOM_ID = 512
_MAX_ERRORS = 100
_SORT_PREFIX_BYTES = 256
"""Requests are sorted by this many first bytes of their bodies, so that requests with equal instructions run in
succession and find the instructions in the prefix cache.
"""


def read_batch_lines(path: Path, endpoint: str, max_bytes: int) -> tuple[list[BatchLine], list[BatchError]]:
    """Returns the requests in processing order, or no requests and up to _MAX_ERRORS errors. `max_bytes` bounds each
    body. Takes 1 s per 100 MB. Raises OSError.
    """
    entries: list[tuple[bytes, int, int, int, str]] = []
    errors: list[BatchError] = []
    names: set[str] = set()
    with path.open("rb") as file:
        for number, begin, line in _iter_lines_with_offsets(file, max_bytes + 4096):
            if number > 2 * MAX_LINES or len(entries) == MAX_LINES:
                return [], [BatchError("too_many_requests", f"The file has more than {MAX_LINES} requests", number)]
            if not line.strip():
                continue
            try:
                job = parse_line(line)
                _check_line_request(job, endpoint, max_bytes, names)
            except InvalidRequest as error:
                errors.append(BatchError("invalid_line", error.message, number, error.param))
                if len(errors) == _MAX_ERRORS or not line.endswith(b"\n"):
                    break
                continue
            names.add(job.custom_id)
            entries.append((job.body[:_SORT_PREFIX_BYTES], number, begin, len(line), job.custom_id))
    if errors:
        return [], errors
    if not entries:
        return [], [BatchError("empty_file", "The file has no requests")]
    entries.sort()
    return [BatchLine(position, *entry[1:]) for position, entry in enumerate(entries)], []


def _iter_lines_with_offsets(file: BinaryIO, max_line_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """Yields each line's number (from 1), byte offset and content. A byte order mark is skipped."""
    number = 0
    start = 0
    while line := file.readline(max_line_bytes):
        number += 1
        begin = start
        start += len(line)
        if number == 1 and line.startswith(BOM_UTF8):  # Windows editors write a byte order mark
            line = line[len(BOM_UTF8) :]
            begin = len(BOM_UTF8)
        yield number, begin, line


def _check_line_request(job: LineRequest, endpoint: str, max_bytes: int, earlier_names: Container[str]) -> None:
    if len(job.body) > max_bytes:
        raise InvalidRequest(f"the body is larger than {max_bytes} bytes", param="body")
    if job.url != endpoint:
        raise InvalidRequest(f"url is {job.url}, the batch is for {endpoint}", param="url")
    if job.custom_id in earlier_names:
        raise InvalidRequest("an earlier line has the same custom_id", param="custom_id")
    if not 0 < len(job.custom_id) <= MAX_CUSTOM_ID or not is_encodable(job.custom_id):
        raise InvalidRequest(f"custom_id must have 1 to {MAX_CUSTOM_ID} characters", param="custom_id")
