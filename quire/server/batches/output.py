"""The files of a batch that ends: the answers, and the errors."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from quire.server.batches.lines import failed_line
from quire.server.peers import Unanswered
from quire.server.store.batches import Batch, Batches, Status, at
from quire.server.store.files import Contents, StoredFile, new_file

_UNDONE = {
    "expired": ("batch_expired", "The batch expired before this request was answered"),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was answered"),
}
_PURPOSE = "batch_output"


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    body: _Body


class _Answered(msgspec.Struct):
    response: _Response


def finish(batches: Batches, contents: Contents, owner: str, batch: Batch) -> None:
    """Write the files of a batch whose lines will get no more results, and end it in the same transaction. In a thread,
    please. Raises OSError and sqlite3.Error, and may then be called again."""
    new: list[StoredFile] = []
    try:
        known = batches.end(owner, _ended(batches, contents, batch, new), new)
    except Unanswered:  # it may be done: then the files are known, else the next start deletes them
        raise
    except BaseException:
        contents.delete(new)
        raise
    if not known:
        contents.delete(new)


def _ended(batches: Batches, contents: Contents, batch: Batch, new: list[StoredFile]) -> Batch:
    """The batch as it is from now on; its files are written, and added to `new`."""
    left = sum(1 for _ in _undone(batches, batch.id))
    status: Status = "cancelled" if batch.status == "cancelling" else "expired" if left else "completed"
    used = _Usage()
    answers = _write(contents, batch, "output", _counting(_results(batches, batch.id, failed=False), used))
    new += [] if answers is None else [answers]
    errors = _write(contents, batch, "errors", _errors(batches, batch.id, status))
    new += [] if errors is None else [errors]
    return replace(
        at(batch, status),
        output_file_id=answers and answers.id,
        error_file_id=errors and errors.id,
        failed=batch.failed + left,
        input_tokens=used.prompt_tokens + used.input_tokens,
        output_tokens=used.completion_tokens + used.output_tokens,
    )


def _write(contents: Contents, batch: Batch, name: str, lines: Iterator[bytes]) -> StoredFile | None:
    """None where there are no lines."""
    if (first := next(lines, None)) is None:
        return None
    file = new_file(f"{batch.id}_{name}.jsonl", _PURPOSE, 0, keep_seconds=batch.keep_seconds)
    contents.create(file.id)
    try:
        with contents.path(file.id).open("r+b") as out:
            out.write(first + b"\n")
            out.writelines(line + b"\n" for line in lines)
            out.flush()
            os.fsync(out.fileno())
            size = out.tell()
    except BaseException:
        contents.path(file.id).unlink(missing_ok=True)
        raise
    return StoredFile(file.id, file.created, file.expires, size, file.name, file.purpose)


def _counting(lines: Iterator[bytes], used: _Usage) -> Iterator[bytes]:
    for line in lines:
        if (one := msgspec.json.decode(line, type=_Answered).response.body.usage) is not None:
            for name in used.__struct_fields__:
                setattr(used, name, getattr(used, name) + getattr(one, name))
        yield line


def _results(batches: Batches, id: str, *, failed: bool) -> Iterator[bytes]:
    """The lines of a file, in the order of the input's."""
    last = 0
    while rows := batches.results(id, last, failed=failed):
        yield from (line for _, line in rows)
        last = rows[-1][0]


def _errors(batches: Batches, id: str, status: Status) -> Iterator[bytes]:
    yield from _results(batches, id, failed=True)
    if status in _UNDONE:
        for custom_id in _undone(batches, id):
            yield failed_line(custom_id, *_UNDONE[status])


def _undone(batches: Batches, id: str) -> Iterator[str]:
    place = -1
    while lines := batches.left(id, place, 1000):
        yield from (line.custom_id for line in lines)
        place = lines[-1].place
