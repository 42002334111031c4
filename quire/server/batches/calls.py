"""Requests that the server makes to itself in the name of a tenant, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message

_LATER = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_LONGEST_WAIT = 30.0
"""Seconds between two tries of a request for which there was no room."""
_FIXED: Mapping[str, Any] = {
    **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"},
    **{"root_path": "", "client": ("127.0.0.1", 0), "server": ("batch", None)},
}


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


class Asking:
    """Asks the application by ASGI alone: an HTTP client costs the event loop half a millisecond more a request, and
    leaves cycles of references behind."""

    def __init__(self, app: ASGIApp, more: Mapping[str, Any], left: asyncio.Event) -> None:
        """`more`: what the scopes of its requests have beside their own, the `tenant` above all. Once `left` is set,
        they end as if their caller had left."""
        self._app = app
        self._more = more
        self._left = left

    async def answer(self, path: str, body: bytes) -> Answer | None:
        """The answer to a POST, once there is room for it; None where `left` was set before. `path`: may have a
        query."""
        wait = 0.25
        while not self._left.is_set():
            answer = await self._once(path, body)
            if self._left.is_set() and answer.status != HTTPStatus.OK:
                return None
            if answer.status not in _LATER or answer.headers.get("x-should-retry") == "false":
                return answer
            with suppress(TimeoutError):
                await asyncio.wait_for(self._left.wait(), wait)
            wait = min(2 * wait, _LONGEST_WAIT)
        return None

    async def _once(self, path: str, body: bytes) -> Answer:
        """One try. Where the application fails, that is status 500."""
        path, _, query = path.partition("?")
        length = (b"content-length", b"%d" % len(body))
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), length]
        own = {"path": path, "raw_path": path.encode(), "query_string": query.encode(), "headers": headers}
        unread = [{"type": "http.request", "body": body, "more_body": False}]
        status, told, pieces = int(HTTPStatus.INTERNAL_SERVER_ERROR), dict[str, str](), list[bytes]()

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await self._left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                pairs = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"])
                told.update((name.lower(), value) for name, value in pairs)
            else:
                pieces.append(message.get("body", b""))

        with suppress(Exception):  # which the application has logged
            await self._app({**_FIXED, **own, **self._more}, receive, send)
        return Answer(status, told, b"".join(pieces))
