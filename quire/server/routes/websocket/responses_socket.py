from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from enum import IntEnum
from typing import Any

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from quire.engine.common.errors import Overloaded
from quire.server.access.admission import SHUTTING_DOWN_MESSAGE
from quire.server.access.authentication import tenant_of
from quire.server.access.body_reader import READ_BODY_SCOPE_KEY, BodyBuffer
from quire.server.durability.replayed_request import LAST_EVENT_ID
from quire.server.durability.resumable_calls import IDEMPOTENCY_HEADER
from quire.server.error_responses import (
    INVALID_REQUEST_TYPE,
    RETRY_AFTER_SECONDS,
    ErrorInfo,
    error_info,
    error_response,
    http_error_info,
)
from quire.server.http.websocket import GOING_AWAY_SCOPE_KEY, MORE_PIECES_KEY
from quire.server.pipeline.stored_response import RESPONSE_CACHE_SCOPE_KEY
from quire.server.resolve.other_apis.history import CachedResponse, WebSocketHistory
from quire.server.routes.websocket.client_events import (
    CreateEvent,
    EventRefused,
    SteerEvent,
    encode_error_event,
    encode_steer_failure,
    parse_client_event,
)
from quire.server.routes.websocket.event_relay import EventRelay
from quire.server.routes.websocket.lanes import Lane, Lanes
from quire.server.runtime.server_context import ServerContext

log = logging.getLogger("quire.server")
router = APIRouter()

PATH = "/v1/responses"
MAX_CONNECTION_SECONDS = 3600.0
"""OpenAI's limit."""
MAX_MALFORMED_EVENTS = 100
_UNUSABLE_HEADERS = (IDEMPOTENCY_HEADER, LAST_EVENT_ID)
"""Headers that apply to a single request, whereas a connection carries many."""
_CONNECTION_HEADERS = frozenset(
    (
        b"authorization",
        b"connection",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"cookie",
        b"expect",
        b"origin",
        b"te",
        b"transfer-encoding",
        b"upgrade",
        b"x-api-key",
        b"x-request-id",
    )
)


class CloseCode(IntEnum):
    """Close codes of RFC 6455, 7.4.1."""

    NORMAL = 1000
    GOING_AWAY = 1001
    POLICY_VIOLATION = 1008
    TOO_BIG = 1009
    INTERNAL_ERROR = 1011


@router.websocket(PATH)
async def serve_responses(websocket: WebSocket) -> None:
    server: ServerContext = websocket.app.state.server
    owner, connections = tenant_of(websocket.scope).name, server.websockets.connections
    refusal = _find_refusal(websocket, server)
    if refusal is not None:
        headers = {"Retry-After": RETRY_AFTER_SECONDS} if refusal.status == 503 else {}
        return await websocket.send_denial_response(error_response(PATH, refusal, headers))
    connections.adjust_held_amount(owner, 1)
    try:
        with server.http_metrics.open_websockets.track_inprogress():
            await ResponsesSocket(websocket, server).serve()
    finally:
        connections.adjust_held_amount(owner, -1)


def _find_refusal(websocket: WebSocket, server: ServerContext) -> ErrorInfo | None:
    for name in _UNUSABLE_HEADERS:
        if name in websocket.headers:
            message = f"{name} is not available over a WebSocket, which carries many requests: use POST"
            return ErrorInfo(400, message, INVALID_REQUEST_TYPE, name)
    if not server.config.max_websockets:  # with this status Codex falls back to POST
        message = "WebSockets are disabled (--max-websockets 0): use POST"
        return ErrorInfo(426, message, INVALID_REQUEST_TYPE, None, "websockets_disabled")
    if not server.websockets.connections.has_room(tenant_of(websocket.scope).name, 1):
        return error_info(Overloaded("Too many WebSockets are open (--max-websockets). Please try again later"))
    return None


class ResponsesSocket:
    def __init__(self, websocket: WebSocket, server: ServerContext) -> None:
        self._websocket = websocket
        self._body_reader = server.body_reader
        self._tenant = tenant_of(websocket.scope)
        self._lease = server.websockets.new_connection_lease(self._tenant.name)
        self._lanes = Lanes(self._answer, self._lease)
        self._is_closed = asyncio.Event()
        """Set when the client has left, or when nothing more is sent to it."""
        self._end_reason: ErrorInfo | None = None
        self._last_event = ""
        self._num_malformed = 0

    async def serve(self) -> None:
        await self._websocket.accept()
        reading = asyncio.create_task(self._read_events())
        ending = asyncio.create_task(self._wait_for_end())
        close_code = CloseCode.INTERNAL_ERROR
        try:
            await asyncio.wait([reading, ending], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await self._finish_lanes(reading)
            close_code = reading.result() if reading.done() else CloseCode.GOING_AWAY
        except Exception:
            log.exception("a WebSocket failed")
        finally:
            self._is_closed.set()
            self._lanes.drop_waiting_events()
            reading.cancel()
            ending.cancel()
            await asyncio.gather(reading, ending, *self._lanes.tasks, return_exceptions=True)
            self._lease.release_lease()
        with suppress(RuntimeError, WebSocketDisconnect):  # the client has left
            await self._websocket.close(close_code)

    async def _wait_for_end(self) -> None:
        going_away: asyncio.Event = self._websocket.scope.get(GOING_AWAY_SCOPE_KEY) or asyncio.Event()
        try:
            async with asyncio.timeout(MAX_CONNECTION_SECONDS):
                await going_away.wait()
            self._end_reason = error_info(Overloaded(SHUTTING_DOWN_MESSAGE))
        except TimeoutError:
            minutes = MAX_CONNECTION_SECONDS / 60
            message = f"This connection has reached the limit of {minutes:g} minutes: open a new one"
            self._end_reason = ErrorInfo(400, message, INVALID_REQUEST_TYPE, None, "websocket_connection_limit_reached")
            self._last_event = encode_error_event(self._end_reason, None)

    async def _finish_lanes(self, reading: asyncio.Task[CloseCode]) -> None:
        """Reading continues, to notice whether the client leaves."""
        while (tasks := self._lanes.tasks) and not reading.done():
            await asyncio.wait([reading, *tasks], return_when=asyncio.FIRST_COMPLETED)
        if self._last_event and not reading.done():
            await self._send_text(self._last_event)

    async def _read_events(self) -> CloseCode:
        while self._num_malformed < MAX_MALFORMED_EVENTS:
            await asyncio.sleep(0)  # if messages are queued and the client reads nothing, nothing else here suspends
            first = await self._websocket.receive()
            if first["type"] == "websocket.disconnect":
                return CloseCode.NORMAL
            close_code = await self._read_event(ClientMessage(self._websocket, first))
            if close_code is not None:
                return close_code
        return CloseCode.POLICY_VIOLATION

    async def _read_event(self, message: ClientMessage) -> CloseCode | None:
        request = Request({"type": "http", "headers": [], "tenant": self._tenant}, message.receive)
        try:
            async with self._body_reader.hold_request_body(request, json=False) as body:
                content = b"".join(body.chunks)
            await self._handle_event(message, content)
        except ClientDisconnect:
            return CloseCode.NORMAL
        except EventRefused as refused:
            self._num_malformed += refused.info.status == 400
            await self._send_text(encode_error_event(refused.info, refused.stream_id))
        except Overloaded as error:
            await self._send_text(encode_error_event(error_info(error), None))
            await message.skip_rest()
        except HTTPException as error:
            await self._send_text(encode_error_event(http_error_info(error), None))
            return CloseCode.TOO_BIG if error.status_code == 413 else CloseCode.POLICY_VIOLATION
        return None

    async def _handle_event(self, message: ClientMessage, content: bytes) -> None:
        if message.is_binary:
            info = ErrorInfo(400, "Messages must be text, not binary", INVALID_REQUEST_TYPE)
            raise EventRefused(info)
        event = parse_client_event(content)
        if isinstance(event, SteerEvent):
            await self._send_text(encode_steer_failure(event))
        elif self._end_reason is not None:
            raise EventRefused(self._end_reason, event.stream_id)
        else:
            self._lanes.add_event(event)

    async def _answer(self, lane: Lane, event: CreateEvent) -> None:
        relay = EventRelay(self._send_text, lane.stream_id)
        response_cache = LaneResponseCache(self._lanes, lane, self._lanes.find_cached_response(event.previous_id))
        try:
            await self._websocket.app(self._request_scope(event, response_cache), self._receive_disconnect, relay)
            await relay.send_error()
        except Exception:
            log.exception("a response over a WebSocket failed")

    def _request_scope(self, event: CreateEvent, response_cache: LaneResponseCache) -> dict[str, Any]:
        scope = self._websocket.scope
        headers = [
            each
            for each in scope["headers"]
            if each[0] not in _CONNECTION_HEADERS and not each[0].startswith(b"sec-websocket-")
        ]
        headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(event.body))]
        body = BodyBuffer(self._tenant.name, chunks=[event.body], received_bytes=len(event.body))
        return {
            "type": "http",
            "asgi": scope["asgi"],
            "http_version": "1.1",
            "method": "POST",
            "scheme": "https" if scope["scheme"] == "wss" else "http",
            "path": PATH,
            "raw_path": PATH.encode(),
            "headers": headers,
            "tenant": self._tenant,
            READ_BODY_SCOPE_KEY: body,
            RESPONSE_CACHE_SCOPE_KEY: response_cache,
            **{name: scope[name] for name in ("query_string", "root_path", "client", "server")},
        }

    async def _receive_disconnect(self) -> Message:
        await self._is_closed.wait()
        return {"type": "http.disconnect"}

    async def _send_text(self, text: str) -> None:
        if self._is_closed.is_set():
            return
        try:
            await self._websocket.send_text(text)
        except (RuntimeError, WebSocketDisconnect):  # the reading task will notice, too
            self._is_closed.set()


class ClientMessage:
    """An ASGI `receive` that returns a message's pieces as a request's body."""

    def __init__(self, websocket: WebSocket, first: Message) -> None:
        self._websocket = websocket
        self._next: Message | None = first
        self.is_binary = first.get("bytes") is not None
        self._has_more = True

    async def receive(self) -> Message:
        message = await self._websocket.receive() if self._next is None else self._next
        self._next = None
        if message["type"] == "websocket.disconnect":
            self._has_more = False
            return {"type": "http.disconnect"}
        self._has_more = message.get(MORE_PIECES_KEY, False)
        text = message.get("text")
        data = message.get("bytes") or b"" if text is None else text.encode()
        return {"type": "http.request", "body": data, "more_body": self._has_more}

    async def skip_rest(self) -> None:
        while self._has_more:
            await self.receive()


class LaneResponseCache:
    def __init__(self, lanes: Lanes, lane: Lane, previous: CachedResponse | None) -> None:
        self._lanes = lanes
        self._lane = lane
        self.history = WebSocketHistory(previous)

    def cache_response(self, response: CachedResponse) -> None:
        self._lanes.cache_response(self._lane, response)
