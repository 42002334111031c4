"""First station: reads the body."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from quire.server.access.body_reader import BodyBuffer
from quire.server.http.sse import CLIENT_CLOSED_REQUEST
from quire.server.runtime.server_context import get_server_context


@asynccontextmanager
async def read_body(request: Request) -> AsyncIterator[BodyBuffer]:
    """The body's memory counts against the budget until the block ends. Raises the errors of
    BodyReader.hold_request_body, and HTTPException if the client has left.
    """
    try:
        async with get_server_context(request).body_reader.hold_request_body(request) as body:
            yield body
    except ClientDisconnect:
        raise HTTPException(CLIENT_CLOSED_REQUEST) from None
