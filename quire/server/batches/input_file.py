"""Reads the input file of a batch: where each request is, or what is wrong with it."""

from __future__ import annotations

from codecs import BOM_UTF8
from pathlib import Path

from quire.engine.errors import InvalidRequest
from quire.server.batches.batch_lines import parse_line
from quire.server.formats.tools.strict_json import is_encodable
from quire.server.store.batches import BatchError, BatchLine

MAX_LINES = 50_000
"""Requests of a batch, as at OpenAI."""
MAX_CUSTOM_ID = 512
"""Characters."""
_MAX_ERRORS = 100
"""Lines beyond these get no error of their own."""
_SORT_PREFIX_BYTES = 256
"""Leading bytes of a body by which requests are sorted. Requests with the same instructions then follow one another
while the pages of their common prefix are cached."""


def read_batch_lines(path: Path, endpoint: str, max_bytes: int) -> tuple[list[BatchLine], list[BatchError]]:
    """The requests of a file, in the order in which they are to begin, or else all errors. `max_bytes`: of a body.

    Takes a second for 100 MB; in a thread, please. Raises OSError.
    """
    entries: list[tuple[bytes, int, int, int, str]] = []
    errors: list[BatchError] = []
    names: set[str] = set()
    with path.open("rb") as file:
        number = start = 0
        while line := file.readline(max_bytes + 4096):
            number, begin, start = number + 1, start, start + len(line)
            if number == 1 and line.startswith(BOM_UTF8):  # as Windows' editors write it
                line, begin = line[len(BOM_UTF8) :], len(BOM_UTF8)
            if number > 2 * MAX_LINES or len(entries) == MAX_LINES:
                return [], [BatchError("too_many_requests", f"The file has more than {MAX_LINES} requests", number)]
            if not line.strip():
                continue
            try:
                job = parse_line(line)
                if len(job.body) > max_bytes:
                    raise InvalidRequest(f"the body is larger than {max_bytes} bytes", param="body")
                if job.url != endpoint:
                    raise InvalidRequest(f"url is {job.url}, the batch is for {endpoint}", param="url")
                if job.custom_id in names:
                    raise InvalidRequest("the custom_id is an earlier line's", param="custom_id")
                if not 0 < len(job.custom_id) <= MAX_CUSTOM_ID or not is_encodable(job.custom_id):
                    raise InvalidRequest(f"custom_id must have 1 to {MAX_CUSTOM_ID} characters", param="custom_id")
            except InvalidRequest as error:
                errors.append(BatchError("invalid_line", error.message, number, error.param))
                if len(errors) == _MAX_ERRORS or not line.endswith(b"\n"):
                    break
                continue
            names.add(job.custom_id)
            entries.append((job.body[:_SORT_PREFIX_BYTES], number, begin, len(line), job.custom_id))
    if not entries and not errors:
        errors.append(BatchError("empty_file", "The file has no requests"))
    entries.sort()
    lines = [BatchLine(position, *entry[1:]) for position, entry in enumerate(entries)]
    return ([], errors) if errors else (lines, [])
