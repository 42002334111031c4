"""POST /api/pull, which needs --allow-pull: downloads a model into the hub's cache by running `quire pull` as a
process, which ends when the caller leaves. What has been downloaded by then stays in the cache."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from quire.engine.errors import InvalidRequest, Overloaded
from quire.server.encoding import encode_json
from quire.server.protocol.ollama import OllamaPullRequest
from quire.server.resolve.parse import parse
from quire.server.routes.bodies import Documented
from quire.server.runtime import server_of
from quire.server.sse import CLIENT_CLOSED_REQUEST

_PULSE = 5.0
"""Seconds after which a caller hears that the download goes on."""
_LARGEST = 2**16
"""Bytes of a body."""
_LINE = encode_json({"status": "pulling manifest"}) + b"\n"


router = APIRouter()


@router.post("/api/pull", response_model=None, openapi_extra=Documented(OllamaPullRequest))
async def pull(request: Request) -> Response:
    """Download a model. Needs an admin's API key; on a server without keys, only callers on this machine may."""
    server = server_of(request)
    if not server.config.allow_pull:
        raise InvalidRequest("Models are not downloaded here: start the server with --allow-pull, or `quire pull`")
    body = parse(await _read(request), OllamaPullRequest)
    if not (name := body.model or body.name or "").strip(" -"):
        raise InvalidRequest("give model, the name of one", param="model")
    if server.pulling.locked():
        raise Overloaded("Another model is being downloaded. Please try again later")
    if body.stream:
        return StreamingResponse(_told(server.pulling, name), media_type="application/x-ndjson")
    async with server.pulling:
        if (wrong := await _pulled(await _begin(name))) is not None:
            raise InvalidRequest(wrong, param="model")
    return Response(encode_json({"status": "success"}), media_type="application/json")


async def _told(alone: asyncio.Lock, name: str) -> AsyncGenerator[bytes]:
    """A line at the beginning, more lines at intervals, and one at the end."""
    async with alone:
        yield _LINE
        done = asyncio.ensure_future(_pulled(await _begin(name)))
        try:
            while not (await asyncio.wait([done], timeout=_PULSE))[0]:
                yield encode_json({"status": f"pulling {name}"}) + b"\n"
            wrong = done.result()
            yield encode_json({"status": "success"} if wrong is None else {"error": wrong}) + b"\n"
        finally:
            done.cancel()
            await asyncio.gather(done, return_exceptions=True)


async def _begin(name: str) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "quire", "pull", "--", name), stdin=PIPE, stdout=PIPE, stderr=PIPE
    )


async def _pulled(process: Process) -> str | None:
    """Downloads, and returns why it failed, or None if it succeeded. A download whose caller leaves is ended."""
    try:
        _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 0:
        return None
    last = said.decode(errors="replace").strip().rpartition("\n")[2]
    return last.removeprefix("quire pull: ") or f"the download ended with code {process.returncode}"


async def _read(request: Request) -> bytes:
    """Raises InvalidRequest for more than a name takes."""
    try:
        async with server_of(request).bodies.read(request) as body:
            if body.size > _LARGEST:
                raise InvalidRequest(f"The body has more than {_LARGEST} bytes")
            return b"".join(body.pieces)
    except ClientDisconnect:
        raise HTTPException(CLIENT_CLOSED_REQUEST) from None
