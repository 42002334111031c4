"""GET /v1/streams/{id}: continues a stream that was cut off."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.engine.common.errors import InvalidRequest, RequestNotFound
from quire.server.access.authentication import owner_of, tenant_of
from quire.server.access.body_reader import READ_BODY_SCOPE_KEY, BodyBuffer
from quire.server.durability.answer_pins import ResumedCall
from quire.server.durability.event_ids import parse_event_id
from quire.server.durability.resumable_calls import CLAIMS_SCOPE_KEY, RESUMABLE_PATHS, RESUMED_SCOPE_KEY, Claim
from quire.server.runtime.server_context import get_server_context

router = APIRouter()
LAST_EVENT_ID = "last-event-id"


@router.get("/v1/streams/{stream_id}", response_model=None)
async def resume_stream(stream_id: str, request: Request) -> Response:
    """The events after the one that the header Last-Event-ID names; without the header, all of them. Another reader of
    the same stream gets no more events."""
    streams, owner = get_server_context(request).resumable_calls, owner_of(request)
    if streams is None:
        raise RequestNotFound("This server keeps no streams: see --data-dir")
    seen_events: tuple[int, ...] = ()
    if (last_event_id := request.headers.get(LAST_EVENT_ID)) is not None:
        parsed_id = parse_event_id(last_event_id)
        if parsed_id is None or parsed_id[0] != stream_id:
            raise InvalidRequest("Last-Event-ID is the id of no event of this stream", param=LAST_EVENT_ID)
        seen_events = parsed_id[1]
    call = await streams.find_call(owner, stream_id)
    if call is None:
        raise RequestNotFound(f"No stream `{stream_id}` is kept here, or not any more", param="stream_id")
    if call.pins.background:
        alternative = f"GET /v1/responses/{stream_id}, with stream=true and starting_after"
        raise InvalidRequest(f"The response goes on in the background: {alternative}", param="stream_id")
    claims: list[Claim] = []
    return _ReplayedRouteResponse(await streams.prepare_resume(owner, call, seen_events, claims), claims)


class _ReplayedRouteResponse(Response):
    """The answer of the original call's route."""

    def __init__(self, resumed: ResumedCall, claims: list[Claim]) -> None:
        super().__init__()
        self._resumed = resumed
        self._claims = claims

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app, server = scope["app"], scope["app"].state.server
        try:
            await app.router({**replay_scope(scope, self._resumed), CLAIMS_SCOPE_KEY: self._claims}, receive, send)
        finally:
            server.resumable_calls.release_claims(self._claims)


def replay_scope(scope: Scope, resumed: ResumedCall) -> dict[str, Any]:
    """The scope of a call that is made again. Its body has been read."""
    call = resumed.call
    body = BodyBuffer(tenant_of(scope).name, chunks=[call.body], received_bytes=len(call.body))
    target = {"method": "POST", "path": call.path, "raw_path": call.path.encode()}
    query = urlencode({"model": call.pins.model}).encode()
    return {**scope, **target, "query_string": query, READ_BODY_SCOPE_KEY: body, RESUMED_SCOPE_KEY: resumed}


class ResumptionMiddleware:
    """ASGI middleware for calls that are sent again.

    Some clients can only repeat the POST of a stream, with Last-Event-ID. Such a POST is handled as a GET of the
    stream, and its body is not read. When a request ends, its Idempotency-Key is released.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in RESUMABLE_PATHS:
            return await self._app(scope, receive, send)
        last_event_id = Headers(scope=scope).get(LAST_EVENT_ID)
        if last_event_id is not None:
            path = f"/v1/streams/{last_event_id.rpartition(':')[0] or '-'}"
            return await self._app({**scope, "method": "GET", "path": path, "raw_path": path.encode()}, receive, send)
        claims: list[Claim] = []
        try:
            await self._app({**scope, CLAIMS_SCOPE_KEY: claims}, receive, send)
        finally:
            if claims and (streams := scope["app"].state.server.resumable_calls) is not None:
                streams.release_claims(claims)
