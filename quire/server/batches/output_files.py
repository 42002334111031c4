from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from quire.server.batches.batch_lines import encode_error_line
from quire.server.store.batches import Batch, Batches, BatchStatus, with_batch_status
from quire.server.store.database import StoreUnreachable
from quire.server.store.files import FileContents, StoredFile, new_file

_UNANSWERED_ERRORS = {
    "expired": ("batch_expired", "The batch expired before this request was answered"),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was answered"),
}
_OUTPUT_PURPOSE = "batch_output"


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _ResponseBody(msgspec.Struct):
    usage: _Usage | None = None


class _LineResponse(msgspec.Struct):
    body: _ResponseBody


class _AnswerLine(msgspec.Struct):
    response: _LineResponse


def finish_batch(batches: Batches, contents: FileContents, owner: str, batch: Batch) -> None:
    """Ends the batch in the transaction that adds the files' rows. Blocks. May be called again after an error. Raises
    OSError and sqlite3.Error.
    """
    new_files: list[StoredFile] = []
    try:
        was_ended_here = batches.end(owner, _write_batch_files(batches, contents, batch, new_files), new_files)
    except StoreUnreachable:  # if the batch ended, its files have rows; otherwise the next start deletes them
        raise
    except BaseException:
        contents.delete_contents(new_files)
        raise
    if not was_ended_here:
        contents.delete_contents(new_files)


def _write_batch_files(batches: Batches, contents: FileContents, batch: Batch, new_files: list[StoredFile]) -> Batch:
    num_unanswered = sum(1 for _ in _iter_unanswered_ids(batches, batch.id))
    status: BatchStatus = "cancelled" if batch.status == "cancelling" else "expired" if num_unanswered else "completed"
    usage = _Usage()
    answers = _write_file(
        contents, batch, "output", _iter_and_count_usage(_iter_results(batches, batch.id, failed=False), usage)
    )
    new_files += [] if answers is None else [answers]
    errors = _write_file(contents, batch, "errors", _iter_error_lines(batches, batch.id, status))
    new_files += [] if errors is None else [errors]
    return replace(
        with_batch_status(batch, status),
        output_file_id=answers and answers.id,
        error_file_id=errors and errors.id,
        failed=batch.failed + num_unanswered,
        input_tokens=usage.prompt_tokens + usage.input_tokens,
        output_tokens=usage.completion_tokens + usage.output_tokens,
    )


def _write_file(contents: FileContents, batch: Batch, name: str, lines: Iterator[bytes]) -> StoredFile | None:
    if (first := next(lines, None)) is None:
        return None
    file = new_file(f"{batch.id}_{name}.jsonl", _OUTPUT_PURPOSE, 0, keep_seconds=batch.keep_seconds)
    contents.create_empty_content(file.id)
    try:
        with contents.content_path(file.id).open("r+b") as out:
            out.write(first + b"\n")
            out.writelines(line + b"\n" for line in lines)
            out.flush()
            os.fsync(out.fileno())
            size = out.tell()
    except BaseException:
        contents.content_path(file.id).unlink(missing_ok=True)
        raise
    return StoredFile(file.id, file.created, file.expires, size, file.name, file.purpose)


def _iter_and_count_usage(lines: Iterator[bytes], usage: _Usage) -> Iterator[bytes]:
    for line in lines:
        if (line_usage := msgspec.json.decode(line, type=_AnswerLine).response.body.usage) is not None:
            for name in usage.__struct_fields__:
                setattr(usage, name, getattr(usage, name) + getattr(line_usage, name))
        yield line


def _iter_results(batches: Batches, id: str, *, failed: bool) -> Iterator[bytes]:
    last = 0
    while rows := batches.list_result_lines(id, last, failed=failed):
        yield from (line for _, line in rows)
        last = rows[-1][0]


def _iter_error_lines(batches: Batches, id: str, status: BatchStatus) -> Iterator[bytes]:
    yield from _iter_results(batches, id, failed=True)
    if status in _UNANSWERED_ERRORS:
        for custom_id in _iter_unanswered_ids(batches, id):
            yield encode_error_line(custom_id, *_UNANSWERED_ERRORS[status])


def _iter_unanswered_ids(batches: Batches, id: str) -> Iterator[str]:
    position = -1
    while lines := batches.list_unanswered_lines(id, position, 1000):
        yield from (line.custom_id for line in lines)
        position = lines[-1].position
