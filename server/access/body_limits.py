"""Limits the size of request bodies, counted while they arrive, and how deep their JSON is nested."""

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
_NO_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))
_BRACKET_DEPTHS = bytes.maketrans(_BRACKETS, b"\x01\xff\x01\xff")
"""Maps brackets to signed bytes: an opening one to +1, a closing one to -1."""


class BodyLimitMiddleware:
    """ASGI middleware that answers a body of more than `max_bytes` with 413 and one that is nested too deeply with 400.

    It collects a body only when the application first asks for it, so a request that is refused for its headers is
    answered without waiting for its body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        collected = False

        async def receive_limited() -> Message:
            nonlocal collected
            if collected:
                return await receive()
            collected = True
            return await self._collect(scope, receive)

        await self._app(scope, receive_limited, send)

    async def _collect(self, scope: Scope, receive: Receive) -> Message:
        """Receive the whole body as one message.

        Raises HTTPException where the application awaits the body; its error handlers turn that into the response.
        """
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
    """Whether brackets outside of strings are nested more than MAX_JSON_DEPTH deep. The body need not be valid JSON."""
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH:
        return False
    changes = array("b", _STRING.sub(b"", body).translate(_BRACKET_DEPTHS, _NO_BRACKETS))
    return max(accumulate(changes), default=0) > MAX_JSON_DEPTH
