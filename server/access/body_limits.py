"""Limits of request bodies: their size, and how deep their JSON is nested."""

from __future__ import annotations

import re
from array import array
from itertools import accumulate

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_JSON_DEPTH = 100
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKETS = b"[]{}"
_OTHERS = bytes(set(range(256)) - set(_BRACKETS))
_STEPS = bytes.maketrans(_BRACKETS, b"\x01\xff\x01\xff")
"""Maps an opening bracket to 1 and a closing one to -1, as signed bytes."""


class BodyLimitMiddleware:
    """ASGI middleware. A body over `max_bytes` is answered 413, one that is nested too deeply 400.

    A body is read when the application first asks for it: a request that is refused without it is refused at once.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        gathered = False

        async def bounded() -> Message:
            nonlocal gathered
            if gathered:
                return await receive()
            gathered = True
            return await self._gather(scope, receive)

        await self._app(scope, bounded, send)

    async def _gather(self, scope: Scope, receive: Receive) -> Message:
        """The whole body in one message. Raises HTTPException, which the application answers."""
        if int(Headers(scope=scope).get("content-length", 0)) > self._max_bytes:
            raise self._too_large()
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return message
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._max_bytes:
                raise self._too_large()
        if too_deep(body):
            raise HTTPException(400, f"The body is nested more than {MAX_JSON_DEPTH} levels deep")
        return {"type": "http.request", "body": bytes(body), "more_body": False}

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"The body is larger than {self._max_bytes} bytes; the operator sets --max-body-size")


def too_deep(body: bytes | bytearray) -> bool:
    """Whether brackets outside strings are nested more than MAX_JSON_DEPTH deep. The body need not be JSON."""
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH:
        return False
    steps = array("b", _STRING.sub(b"", body).translate(_STEPS, _OTHERS))
    return max(accumulate(steps), default=0) > MAX_JSON_DEPTH
