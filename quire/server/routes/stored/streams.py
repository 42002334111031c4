"""GET /v1/streams/{id}: continues a stream that was cut off."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.engine.errors import InvalidRequest, RequestNotFound
from quire.server.access.authentication import tenant_of
from quire.server.access.bodies import READ, Body
from quire.server.again import Resumed
from quire.server.generation.answers.numbered import parse_id
from quire.server.routes.bodies import owner_of
from quire.server.runtime import server_of
from quire.server.streams import CLAIMS, PATHS, RESUMED, Claim

router = APIRouter()
LAST = "last-event-id"


@router.get("/v1/streams/{stream_id}", response_model=None)
async def resume_stream(stream_id: str, request: Request) -> Response:
    """The events after the one that the header Last-Event-ID names; without the header, all of them. Another reader of
    the same stream gets no more events."""
    streams, owner = server_of(request).streams, owner_of(request)
    if streams is None:
        raise RequestNotFound("This server keeps no streams: see --data-dir")
    seen: tuple[int, ...] = ()
    if (given := request.headers.get(LAST)) is not None:
        found = parse_id(given)
        if found is None or found[0] != stream_id:
            raise InvalidRequest("Last-Event-ID is the id of no event of this stream", param=LAST)
        seen = found[1]
    call = await streams.find(owner, stream_id)
    if call is None:
        raise RequestNotFound(f"No stream `{stream_id}` is kept here, or not any more", param="stream_id")
    if call.pins.background:
        way = f"GET /v1/responses/{stream_id}, with stream=true and starting_after"
        raise InvalidRequest(f"The response goes on in the background: {way}", param="stream_id")
    claims: list[Claim] = []
    return _Again(await streams.resumed(owner, call, seen, claims), claims)


class _Again(Response):
    """The answer of the original call's route."""

    def __init__(self, resumed: Resumed, claims: list[Claim]) -> None:
        super().__init__()
        self._resumed = resumed
        self._claims = claims

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app, server = scope["app"], scope["app"].state.server
        try:
            await app.router({**again(scope, self._resumed), CLAIMS: self._claims}, receive, send)
        finally:
            server.streams.release(self._claims)


def again(scope: Scope, resumed: Resumed) -> dict[str, Any]:
    """The scope of a call that is made again. Its body has been read."""
    call = resumed.call
    body = Body(tenant_of(scope).name, pieces=[call.body], size=len(call.body))
    where = {"method": "POST", "path": call.path, "raw_path": call.path.encode()}
    query = urlencode({"model": call.pins.model}).encode()
    return {**scope, **where, "query_string": query, READ: body, RESUMED: resumed}


class ResumptionMiddleware:
    """ASGI middleware for calls that are sent again.

    Some clients can only repeat the POST of a stream, with Last-Event-ID. Such a POST is handled as a GET of the
    stream, and its body is not read. When a request ends, its Idempotency-Key is released.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            return await self._app(scope, receive, send)
        last = Headers(scope=scope).get(LAST)
        if last is not None:
            path = f"/v1/streams/{last.rpartition(':')[0] or '-'}"
            return await self._app({**scope, "method": "GET", "path": path, "raw_path": path.encode()}, receive, send)
        claims: list[Claim] = []
        try:
            await self._app({**scope, CLAIMS: claims}, receive, send)
        finally:
            if claims and (streams := scope["app"].state.server.streams) is not None:
                streams.release(claims)
