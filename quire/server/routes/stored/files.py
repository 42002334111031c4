"""/v1/files: OpenAI's Files API."""

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

from quire.engine.errors import InvalidRequest, Overloaded, RequestNotFound
from quire.server.access.admission import FileRoute
from quire.server.access.encodings import BodyTooLarge, Decoder, encodings_of, in_thread
from quire.server.batches.runner import BatchRunner
from quire.server.encoding import encode_json
from quire.server.peers import Unanswered
from quire.server.protocol.kept import MAX_KEPT, MIN_KEPT
from quire.server.routes.bodies import owner_of
from quire.server.routes.stored.pages import Order, found, no_after, page_of
from quire.server.runtime import server_of
from quire.server.sse import CLIENT_CLOSED_REQUEST
from quire.server.store.files import NO_ROOM, StoredFile, new_file, new_file_id

router = APIRouter(route_class=FileRoute)
Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
"""OpenAI's. All are kept; only batches read them."""
PURPOSE = "batch"
FileLimit = Annotated[int, Query(ge=1, le=10_000)]
MAX_FILE_BYTES = 512 << 20
"""As at OpenAI."""
_LONGEST = 3600.0
"""Seconds that an upload may take."""
_AHEAD_BYTES = 4 << 20
"""Reserved at a time for a file whose length is not announced."""
_MAX_NAME = 255
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
FORM = {
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
                    "expires_after[seconds]": {"type": "integer", "minimum": MIN_KEPT, "maximum": MAX_KEPT},
                },
            }
        }
    },
}
"""Of the OpenAPI description."""


@router.post("/v1/files", response_model=None, openapi_extra={"requestBody": FORM})
async def upload_file(request: Request) -> Response:
    """Keep a file, in the fields `file` and `purpose` of a form."""
    runner, owner = batches_of(request), owner_of(request)
    _check_sender(request)
    if not runner.uploads.fits(owner, 1):
        raise Overloaded("Too many files are uploaded at the same time. Please try again later")
    runner.uploads.take(owner, 1)
    upload = _Upload(request, runner, owner)
    try:
        await upload.start()
        async with _received(request, upload) as (content, name, purpose, keep):
            assert content.size is not None
            file = new_file(name, purpose, content.size, keep_seconds=keep, id=upload.id)
            await asyncio.to_thread(_store, runner, owner, file, content.file)
    except OSError as error:
        raise Overloaded(f"The file cannot be kept now: {error.strerror}", param="data_dir") from None
    finally:
        runner.uploads.take(owner, -1)
        await asyncio.shield(upload.end())
    return _answer(file)


class _Upload:
    """Room for a file that comes, which is reserved before what needs it is read."""

    def __init__(self, request: Request, runner: BatchRunner, owner: str) -> None:
        self._files, self._owner = runner.files, owner
        durable = server_of(request).durable
        assert durable is not None
        self._process = durable.peers.process
        self.id = new_file_id()
        self._expected = int(request.headers.get("content-length", 0))
        self._reserved = 0
        self._received = 0

    async def start(self) -> None:
        """Raises HTTPException where the form that is announced is too large."""
        await self._reserve(self._expected)

    async def count(self, size: int) -> None:
        """Raises HTTPException where `size` bytes more are too many."""
        self._received += size
        if self._received > self._reserved:  # its length was not announced
            await self._reserve(self._received, self._received + _AHEAD_BYTES)

    async def _reserve(self, *sizes: int) -> None:
        """The largest of these sizes for which there is room; the first is needed."""
        if sizes[0] > MAX_FILE_BYTES:
            raise HTTPException(413, f"A file may have {MAX_FILE_BYTES} bytes")
        for size in sorted(sizes, reverse=True):
            if await asyncio.to_thread(self._files.reserve, self._owner, self.id, size, self._process):
                self._reserved = size
                return
        raise HTTPException(413, NO_ROOM)

    async def end(self) -> None:
        with suppress(sqlite3.OperationalError):  # the process that has the data is replaced, and knows of none
            await asyncio.to_thread(self._files.release, self.id)


def _store(runner: BatchRunner, owner: str, file: StoredFile, content: BinaryIO) -> None:
    """Write a file and make it known; whatever fails leaves nothing. All of it is one thread's, which goes on where its
    caller gives up."""
    kept = False
    try:
        runner.contents.write(file.id, content)
        runner.files.add(owner, file)
        kept = True
    except Unanswered:
        kept = True  # who does not answer may have made it known
        raise
    finally:
        if not kept:
            runner.contents.delete([file])


@router.get("/v1/files", response_model=None)
async def list_files(
    request: Request,
    limit: FileLimit = 10_000,
    order: Order = "desc",
    after: str | None = None,
    purpose: str | None = None,
) -> Response:
    method = partial(batches_of(request).files.page, newest_first=order == "desc", after=after, purpose=purpose)
    page = await found(request, method, limit, lacking=no_after("file", after))
    return page_of([told(file) for file in page[0]], more=page[1])


@router.get("/v1/files/{file_id}", response_model=None)
async def retrieve_file(file_id: str, request: Request) -> Response:
    return _answer(await _find(request, file_id))


@router.get("/v1/files/{file_id}/content", response_model=None)
async def retrieve_content(file_id: str, request: Request) -> Response:
    """The content of a file; only a range of bytes if the header Range names one."""
    file = await _find(request, file_id)
    if not await asyncio.to_thread(batches_of(request).contents.path(file.id).exists):
        raise RequestNotFound(f"The content of `{file_id}` is not on the disk any more", param="file_id")
    media = "application/jsonl" if file.name.endswith(".jsonl") else "application/octet-stream"
    return FileResponse(batches_of(request).contents.path(file.id), media_type=media, filename=file.name)


@router.delete("/v1/files/{file_id}", response_model=None)
async def delete_file(file_id: str, request: Request) -> dict[str, Any]:
    runner, owner = batches_of(request), owner_of(request)
    if await asyncio.to_thread(runner.uses, file_id, owner):
        raise InvalidRequest("file_id: a batch that has not ended reads it: cancel that first", param="file_id")
    await found(request, runner.files.delete, file_id, lacking=missing(file_id, "file_id"))
    return {"id": file_id, "object": "file", "deleted": True}


@asynccontextmanager
async def _received(request: Request, upload: _Upload) -> AsyncIterator[tuple[UploadFile, str, str, int | None]]:
    """The file of the form, its name and purpose, and the seconds for which it is kept (None: forever). Large content
    goes to a temporary file."""

    encodings = encodings_of(request.headers)

    async def counted() -> AsyncGenerator[bytes]:
        decoder = Decoder(encodings, MAX_FILE_BYTES)
        try:
            async for piece in request.stream():
                if not encodings:
                    await upload.count(len(piece))
                    yield piece
                    await asyncio.sleep(0)
                    continue
                async for part in in_thread(decoder.feed(piece)):
                    await upload.count(len(part))
                    yield part
            decoder.end()
        except BodyTooLarge:
            raise HTTPException(413, f"A file may have {MAX_FILE_BYTES} bytes") from None

    headers = _form_headers(request.headers.get("content-type", ""))
    parser = MultiPartParser(headers, counted(), max_files=1, max_fields=len(_FIELDS), max_part_size=256)
    try:
        async with asyncio.timeout(_LONGEST):
            form = await parser.parse()
    except MultiPartException as error:
        raise InvalidRequest(f"The form cannot be read: {error.message}") from None
    except UnicodeError:  # some versions of the parser raise it
        raise InvalidRequest("The form cannot be read: a name in it is no text") from None
    except ClientDisconnect:
        raise HTTPException(CLIENT_CLOSED_REQUEST) from None
    except TimeoutError:
        raise HTTPException(408, f"The file did not come within {_LONGEST:g} s") from None
    try:
        content, purpose = form.get("file"), form.get("purpose")
        if not isinstance(content, UploadFile):
            raise InvalidRequest("file is required", param="file")
        if purpose not in get_args(Purpose):
            raise InvalidRequest(f"purpose must be one of {', '.join(get_args(Purpose))}", param="purpose")
        yield content, _name(content), str(purpose), _seconds(form.get(_FIELDS[1]), form.get(_FIELDS[2]))
    finally:
        await form.close()


def _form_headers(kind: str) -> Headers:
    """What the parser reads of a form's type: its boundary. Names of charsets are left out, as RFC 7578 knows none:
    Python has charsets that decode to half surrogates, take quadratic time, or are none of texts. So names are UTF-8,
    or else Latin-1. Raises InvalidRequest."""
    try:
        main, options = parse_options_header(kind)
    except UnicodeError:
        main, options = b"", {}
    if main != b"multipart/form-data":
        raise InvalidRequest("A file comes as multipart/form-data, with the fields file and purpose")
    boundary = options.get(b"boundary", b"")
    if not re.fullmatch(rb"[\x20-\x7e]{1,200}", boundary) or b'"' in boundary or b"\\" in boundary:
        raise InvalidRequest("The form cannot be read: its type names no boundary, or none that clients may choose")
    return Headers(raw=[(b"content-type", b'multipart/form-data; boundary="%s"' % boundary)])


def _name(content: UploadFile) -> str:
    """The file's name, shortened. Raises InvalidRequest for one that is no text."""
    name = (content.filename or "file")[:_MAX_NAME]
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
        raise InvalidRequest("file: its name has control characters", param="file")
    return name


def _seconds(anchor: object, seconds: object) -> int | None:
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest("expires_after.anchor must be created_at", param="expires_after.anchor")
    if (
        not isinstance(seconds, str)
        or not re.fullmatch(r"[0-9]{1,9}", seconds)
        or not MIN_KEPT <= int(seconds) <= MAX_KEPT
    ):
        told = f"expires_after.seconds must be from {MIN_KEPT} to {MAX_KEPT}"
        raise InvalidRequest(told, param="expires_after.seconds")
    return int(seconds)


def _check_sender(request: Request) -> None:
    """Raises HTTPException for a web page whose origin may not call the server: browsers let any page send a form."""
    origin = request.headers.get("origin")
    allowed = server_of(request).config.allowed_origins
    if origin is None or urlsplit(origin).netloc == request.headers.get("host") or {origin, "*"} & {*allowed}:
        return
    raise HTTPException(403, "Pages of this origin may not upload files: see --allowed-origins")


async def _find(request: Request, file_id: str) -> StoredFile:
    """Raises RequestNotFound."""
    return await found(request, batches_of(request).files.find, file_id, lacking=missing(file_id, "file_id"))


def missing(file_id: str, param: str) -> RequestNotFound:
    return RequestNotFound(f"No file `{file_id}` is kept here, or not any more", param=param)


def batches_of(request: Request) -> BatchRunner:
    """Raises RequestNotFound where nothing is kept."""
    runner = server_of(request).batches
    if runner is None:
        raise RequestNotFound("This server keeps no files and batches: see --data-dir")
    return runner


def _answer(file: StoredFile) -> Response:
    return Response(encode_json(told(file)), media_type="application/json")


def told(file: StoredFile) -> dict[str, Any]:
    """A file in OpenAI's form."""
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
