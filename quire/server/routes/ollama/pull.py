"""POST /api/pull runs `quire pull`, which ends if the caller leaves; the hub's cache keeps downloaded parts."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from quire.engine.common.errors import InvalidRequest, Overloaded
from quire.server.encoding import encode_json
from quire.server.pipeline.resolve import read_body
from quire.server.protocol.ollama import OllamaPullRequest
from quire.server.resolve.parse import parse_body
from quire.server.routes.api_description import BodySchema
from quire.server.runtime.server_context import get_server_context

_PROGRESS_SECONDS = 5.0
_MAX_BODY_BYTES = 2**16
_FIRST_LINE = encode_json({"status": "pulling manifest"}) + b"\n"


router = APIRouter()


@router.post("/api/pull", response_model=None, openapi_extra=BodySchema(OllamaPullRequest))
async def pull(request: Request) -> Response:
    """Download a model. Needs an admin's API key; without keys, the caller must be a program on this machine."""
    server = get_server_context(request)
    if not server.config.allow_pull:
        raise InvalidRequest("This server does not download models: start it with --allow-pull, or use `quire pull`")
    body = parse_body(await _read_small_body(request), OllamaPullRequest)
    if not (name := body.model or body.name or "").strip(" -"):
        raise InvalidRequest("model is required: the name of a model", param="model")
    if server.pull_lock.locked():
        raise Overloaded("Another model is being downloaded. Please try again later")
    if body.stream:
        return StreamingResponse(
            _download_and_stream_progress(server.pull_lock, name), media_type="application/x-ndjson"
        )
    async with server.pull_lock:
        if (failure := await _wait_for_download(await _spawn_pull_process(name))) is not None:
            raise InvalidRequest(failure, param="model")
    return Response(encode_json({"status": "success"}), media_type="application/json")


async def _download_and_stream_progress(download_lock: asyncio.Lock, name: str) -> AsyncGenerator[bytes]:
    async with download_lock:
        yield _FIRST_LINE
        download = asyncio.ensure_future(_wait_for_download(await _spawn_pull_process(name)))
        try:
            while not (await asyncio.wait([download], timeout=_PROGRESS_SECONDS))[0]:
                yield encode_json({"status": f"pulling {name}"}) + b"\n"
            failure = download.result()
            yield encode_json({"status": "success"} if failure is None else {"error": failure}) + b"\n"
        finally:
            download.cancel()
            await asyncio.gather(download, return_exceptions=True)


async def _spawn_pull_process(name: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "quire",
        "pull",
        "--",
        name,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
    )


async def _wait_for_download(process: Process) -> str | None:
    """Returns the error, or None on success. Kills the process if the caller leaves."""
    try:
        _, error_output = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 0:
        return None
    last_line = error_output.decode(errors="replace").strip().rpartition("\n")[2]
    return last_line.removeprefix("quire pull: ") or f"the download ended with code {process.returncode}"


async def _read_small_body(request: Request) -> bytes:
    async with read_body(request) as body:
        if body.received_bytes > _MAX_BODY_BYTES:
            raise InvalidRequest(f"The body has more than {_MAX_BODY_BYTES} bytes")
        return b"".join(body.chunks)
