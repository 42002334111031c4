from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers
from starlette.types import Message

from quire.server.error_responses import SERVER_ERROR_TYPE, UNEXPECTED_MESSAGE, ErrorInfo
from quire.server.http.sse import EVENT_STREAM_TYPE
from quire.server.routes.websocket.client_events import encode_error_event

_DATA_PREFIX = b"data: "


class EventRelay:
    """An ASGI `send` for one request, which turns events into messages, and an error into an error event."""

    def __init__(self, send_text: Callable[[str], Awaitable[None]], stream_id: str | None) -> None:
        self._send_text = send_text
        self._stream_id = stream_id
        self._event_end = b"}" if stream_id is None else b',"stream_id":"%b"}' % stream_id.encode()
        self._status: int | None = None
        self._headers = Headers()
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], Headers(raw=message["headers"])
        elif not self._is_event_stream:
            self._body += message.get("body", b"")
        else:
            for line in message.get("body", b"").split(b"\n"):
                if line.startswith(_DATA_PREFIX):
                    await self._send_text((line[len(_DATA_PREFIX) : -1] + self._event_end).decode())

    @property
    def _is_event_stream(self) -> bool:
        return self._headers.get("content-type", "").encode() == EVENT_STREAM_TYPE

    async def send_error(self) -> None:
        """Call after the answer. Does nothing for a stream, which has its own error events."""
        if self._is_event_stream:
            return
        info = ErrorInfo(500, UNEXPECTED_MESSAGE, SERVER_ERROR_TYPE, None, "internal_error")
        if self._status is not None and self._body:
            error = json.loads(self._body)["error"]
            info = ErrorInfo(self._status, error["message"], error["type"], error["param"], error["code"])
        names = (each for each in self._headers if each.startswith(("retry-after", "x-ratelimit-", "x-should-retry")))
        headers = {name: self._headers[name] for name in names}
        await self._send_text(encode_error_event(info, self._stream_id, headers))
