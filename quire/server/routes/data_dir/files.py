from __future__ import annotations

import asyncio
import re
import sqlite3
import unicodedata
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Annotated, Any, BinaryIO, Literal, get_args
from urllib.parse import urlsplit

from fastapi import APIRouter, Query
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response

from quire.engine.common.errors import InvalidRequest, Overloaded, RequestNotFound
from quire.server.access.admission import ModelIndependentRoute
from quire.server.access.authentication import owner_of
from quire.server.access.content_encoding import BodyDecoder, BodyTooLarge, iter_parts_in_thread, parse_encodings
from quire.server.batches.runner import BatchRunner
from quire.server.encoding import encode_json
from quire.server.http.sse import CLIENT_CLOSED_REQUEST
from quire.server.protocol.stored_objects import MAX_EXPIRY_SECONDS, MIN_EXPIRY_SECONDS
from quire.server.routes.data_dir.list_pages import Order, find_or_raise, list_page_response, unknown_cursor_error
from quire.server.runtime.server_context import get_server_context
from quire.server.store.database import StoreUnreachable
from quire.server.store.files import STORAGE_FULL_MESSAGE, StoredFile, new_file, new_file_id

router = APIRouter(route_class=ModelIndependentRoute)
Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
BATCH_PURPOSE = "batch"
FileLimit = Annotated[int, Query(ge=1, le=10_000)]
MAX_FILE_BYTES = 512 << 20
"""OpenAI's limit."""
_MAX_UPLOAD_SECONDS = 3600.0
_AHEAD_BYTES = 4 << 20
"""Number of bytes that are reserved ahead if the upload's length is not announced."""
_MAX_NAME_LENGTH = 255
_FORM_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
UPLOAD_FORM_SCHEMA = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"type": "string", "enum": list(get_args(Purpose))},
                    "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                    "expires_after[seconds]": {
                        "type": "integer",
                        "minimum": MIN_EXPIRY_SECONDS,
                        "maximum": MAX_EXPIRY_SECONDS,
                    },
                },
            }
        }
    },
}


@router.post("/v1/files", response_model=None, openapi_extra={"requestBody": UPLOAD_FORM_SCHEMA})
async def upload_file(request: Request) -> Response:
    """Store a file. The request is a form with the fields `file` and `purpose`."""
    runner, owner = require_batch_runner(request), owner_of(request)
    _check_origin(request)
    if not runner.uploads.has_room(owner, 1):
        raise Overloaded("Too many files are uploaded at the same time. Please try again later")
    runner.uploads.adjust_held_amount(owner, 1)
    upload = _UploadSpaceReserver(request, runner, owner)
    try:
        await upload.reserve_announced()
        async with _receive_form(request, upload) as (content, name, purpose, keep_seconds):
            assert content.size is not None
            file = new_file(name, purpose, content.size, keep_seconds=keep_seconds, id=upload.id)
            await asyncio.to_thread(_store_file, runner, owner, file, content.file)
    except OSError as error:
        raise Overloaded(f"The file cannot be stored now: {error.strerror}", param="data_dir") from None
    finally:
        runner.uploads.adjust_held_amount(owner, -1)
        await asyncio.shield(upload.release_reservation())
    return _file_response(file)


class _UploadSpaceReserver:
    def __init__(self, request: Request, runner: BatchRunner, owner: str) -> None:
        self._files, self._owner = runner.files, owner
        durable = get_server_context(request).persistence
        assert durable is not None
        self._process = durable.peers.process_name
        self.id = new_file_id()
        self._expected_bytes = int(request.headers.get("content-length", 0))
        self._reserved_bytes = 0
        self._received_bytes = 0

    async def reserve_announced(self) -> None:
        """Raises HTTPException if the form is too large or there is no room for it."""
        await self._reserve_largest_fitting_size(self._expected_bytes)

    async def count_and_reserve_bytes(self, size: int) -> None:
        """Raises HTTPException if there is no room."""
        self._received_bytes += size
        if self._received_bytes > self._reserved_bytes:  # the length was not announced
            await self._reserve_largest_fitting_size(self._received_bytes, self._received_bytes + _AHEAD_BYTES)

    async def _reserve_largest_fitting_size(self, *sizes: int) -> None:
        """Reserves the largest of `sizes` that fits; the first one is the smallest. Raises HTTPException if not even
        this fits.
        """
        if sizes[0] > MAX_FILE_BYTES:
            raise HTTPException(413, f"A file may have at most {MAX_FILE_BYTES} bytes")
        for size in sorted(sizes, reverse=True):
            if await asyncio.to_thread(self._files.try_reserve_bytes, self._owner, self.id, size, self._process):
                self._reserved_bytes = size
                return
        raise HTTPException(413, STORAGE_FULL_MESSAGE)

    async def release_reservation(self) -> None:
        with suppress(sqlite3.OperationalError):  # a new owner of the data has no reservations
            await asyncio.to_thread(self._files.release, self.id)


def _store_file(runner: BatchRunner, owner: str, file: StoredFile, content: BinaryIO) -> None:
    """Runs in one thread, so that it finishes even if the caller gives up. Deletes the content after an error, except
    after StoreUnreachable, because the data's owner may then have added the file.
    """
    is_kept = False
    try:
        runner.contents.write_content(file.id, content)
        runner.files.add(owner, file)
        is_kept = True
    except StoreUnreachable:
        is_kept = True  # the process that owns the data may have added the file
        raise
    finally:
        if not is_kept:
            runner.contents.delete_contents([file])


@router.get("/v1/files", response_model=None)
async def list_files(
    request: Request,
    limit: FileLimit = 10_000,
    order: Order = "desc",
    after: str | None = None,
    purpose: str | None = None,
) -> Response:
    method = partial(
        require_batch_runner(request).files.page, newest_first=order == "desc", after=after, purpose=purpose
    )
    page = await find_or_raise(request, method, limit, not_found=unknown_cursor_error("file", after))
    return list_page_response([file_object(file) for file in page[0]], has_more=page[1])


@router.get("/v1/files/{file_id}", response_model=None)
async def retrieve_file(file_id: str, request: Request) -> Response:
    return _file_response(await _find_file(request, file_id))


@router.get("/v1/files/{file_id}/content", response_model=None)
async def retrieve_content(file_id: str, request: Request) -> Response:
    """The content of a file, or the range that the header Range names."""
    file = await _find_file(request, file_id)
    if not await asyncio.to_thread(require_batch_runner(request).contents.content_path(file.id).exists):
        raise RequestNotFound(f"The content of `{file_id}` is no longer on disk", param="file_id")
    media = "application/jsonl" if file.name.endswith(".jsonl") else "application/octet-stream"
    return FileResponse(
        require_batch_runner(request).contents.content_path(file.id), media_type=media, filename=file.name
    )


@router.delete("/v1/files/{file_id}", response_model=None)
async def delete_file(file_id: str, request: Request) -> dict[str, Any]:
    runner, owner = require_batch_runner(request), owner_of(request)
    if await asyncio.to_thread(runner.is_file_in_use, file_id, owner):
        raise InvalidRequest("file_id: an unfinished batch reads it: cancel the batch first", param="file_id")
    await find_or_raise(request, runner.files.delete, file_id, not_found=file_not_found(file_id, "file_id"))
    return {"id": file_id, "object": "file", "deleted": True}


@asynccontextmanager
async def _receive_form(
    request: Request, upload: _UploadSpaceReserver
) -> AsyncIterator[tuple[UploadFile, str, str, int | None]]:
    """Yields file, name, purpose, and lifetime in seconds, which is None if unlimited. Large content is in a temporary
    file.
    """

    encodings = parse_encodings(request.headers)

    async def decoded_stream() -> AsyncGenerator[bytes]:
        decoder = BodyDecoder(encodings, MAX_FILE_BYTES)
        try:
            async for chunk in request.stream():
                if not encodings:
                    await upload.count_and_reserve_bytes(len(chunk))
                    yield chunk
                    await asyncio.sleep(0)
                    continue
                async for part in iter_parts_in_thread(decoder.decode_chunk(chunk)):
                    await upload.count_and_reserve_bytes(len(part))
                    yield part
            decoder.check_complete()
        except BodyTooLarge:
            raise HTTPException(413, f"A file may have at most {MAX_FILE_BYTES} bytes") from None

    headers = _sanitize_content_type_header(request.headers.get("content-type", ""))
    parser = MultiPartParser(headers, decoded_stream(), max_files=1, max_fields=len(_FORM_FIELDS), max_part_size=256)
    try:
        async with asyncio.timeout(_MAX_UPLOAD_SECONDS):
            form = await parser.parse()
    except MultiPartException as error:
        raise InvalidRequest(f"The form cannot be read: {error.message}") from None
    except UnicodeError:  # some parser versions raise it
        raise InvalidRequest("The form cannot be read: a name in it is not valid text") from None
    except ClientDisconnect:
        raise HTTPException(CLIENT_CLOSED_REQUEST) from None
    except TimeoutError:
        raise HTTPException(408, f"The file did not arrive within {_MAX_UPLOAD_SECONDS:g} s") from None
    try:
        content, purpose = form.get("file"), form.get("purpose")
        if not isinstance(content, UploadFile):
            raise InvalidRequest("file is required", param="file")
        if purpose not in get_args(Purpose):
            raise InvalidRequest(f"purpose must be one of {', '.join(get_args(Purpose))}", param="purpose")
        yield (
            content,
            _file_name(content),
            str(purpose),
            _parse_keep_seconds(form.get(_FORM_FIELDS[1]), form.get(_FORM_FIELDS[2])),
        )
    finally:
        await form.close()


def _sanitize_content_type_header(content_type: str) -> Headers:
    """Returns a header with only the boundary, because some of Python's charsets yield half surrogates, take quadratic
    time, or are not text, and RFC 7578 has no charset parameter. Without a charset, names are read as UTF-8 or Latin-1.
    """
    try:
        media_type, options = parse_options_header(content_type)
    except UnicodeError:
        media_type, options = b"", {}
    if media_type != b"multipart/form-data":
        raise InvalidRequest("A file comes as multipart/form-data, with the fields file and purpose")
    boundary = options.get(b"boundary", b"")
    if not re.fullmatch(rb"[\x20-\x7e]{1,200}", boundary) or b'"' in boundary or b"\\" in boundary:
        raise InvalidRequest("The form cannot be read: its Content-Type has no valid boundary")
    return Headers(raw=[(b"content-type", b'multipart/form-data; boundary="%s"' % boundary)])


def _file_name(content: UploadFile) -> str:
    name = (content.filename or "file")[:_MAX_NAME_LENGTH]
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
        raise InvalidRequest("file: its name has control characters", param="file")
    return name


def _parse_keep_seconds(anchor: object, seconds: object) -> int | None:
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest("expires_after.anchor must be created_at", param="expires_after.anchor")
    if (
        not isinstance(seconds, str)
        or not re.fullmatch(r"[0-9]{1,9}", seconds)
        or not MIN_EXPIRY_SECONDS <= int(seconds) <= MAX_EXPIRY_SECONDS
    ):
        message = f"expires_after.seconds must be from {MIN_EXPIRY_SECONDS} to {MAX_EXPIRY_SECONDS}"
        raise InvalidRequest(message, param="expires_after.seconds")
    return int(seconds)


def _check_origin(request: Request) -> None:
    """Browsers let any page send a form."""
    origin = request.headers.get("origin")
    allowed = get_server_context(request).config.allowed_origins
    if origin is None or urlsplit(origin).netloc == request.headers.get("host") or {origin, "*"} & {*allowed}:
        return
    raise HTTPException(403, "Pages of this origin may not upload files: see --allowed-origins")


async def _find_file(request: Request, file_id: str) -> StoredFile:
    return await find_or_raise(
        request, require_batch_runner(request).files.find, file_id, not_found=file_not_found(file_id, "file_id")
    )


def file_not_found(file_id: str, param: str) -> RequestNotFound:
    return RequestNotFound(f"No file `{file_id}` is stored here, or it has expired", param=param)


def require_batch_runner(request: Request) -> BatchRunner:
    runner = get_server_context(request).batch_runner
    if runner is None:
        raise RequestNotFound("This server stores no files or batches: see --data-dir")
    return runner


def _file_response(file: StoredFile) -> Response:
    return Response(encode_json(file_object(file)), media_type="application/json")


def file_object(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created,
        "expires_at": file.expires,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }
