"""Resumes a stream by replaying its POST with the journal's body."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.access.authentication import tenant_of
from quire.server.access.body_reader import READ_BODY_SCOPE_KEY, BodyBuffer
from quire.server.durability.answer_pins import ResumedCall
from quire.server.durability.resumable_calls import CLAIMS_SCOPE_KEY, RESUMABLE_PATHS, RESUMED_SCOPE_KEY, Claim

LAST_EVENT_ID = "last-event-id"


class ReplayedRouteResponse(Response):
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
    call = resumed.call
    body = BodyBuffer(tenant_of(scope).name, chunks=[call.body], received_bytes=len(call.body))
    target = {"method": "POST", "path": call.path, "raw_path": call.path.encode()}
    query = urlencode({"model": call.pins.model}).encode()
    return {**scope, **target, "query_string": query, READ_BODY_SCOPE_KEY: body, RESUMED_SCOPE_KEY: resumed}


class ResumptionMiddleware:
    """Handles a POST with Last-Event-ID as a GET of the stream, without reading its body, because some clients can only
    repeat the POST.
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
