"""Server-sent events: one body chunk per engine step, and an end as soon as the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.errors import stream_error

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back to fill its buffers
)


class EventStream(Response):
    """Sends chunks as they come; each is one or more whole events.

    `close` is called when the client disconnects and when the stream ends, and must end `chunks`. An exception before
    the first chunk is raised, to get a status of its own; a later one is sent as an OpenAI error body, the last event.
    """

    def __init__(self, chunks: AsyncIterator[bytes], close: Callable[[], None], headers: Mapping[str, str]) -> None:
        self._chunks = chunks
        self._close = close
        self.status_code = 200
        self.background = None
        self.raw_headers = [*HEADERS, *((name.lower().encode(), value.encode()) for name, value in headers.items())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with closing_on_disconnect(receive, self._close):
            chunk = await anext(self._chunks, b"")
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            try:
                async for chunk in self._chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                last = b""
            except Exception as error:
                last = stream_error(error)
            await send({"type": "http.response.body", "body": last, "more_body": False})


@asynccontextmanager
async def closing_on_disconnect(receive: Receive, close: Callable[[], None]) -> AsyncIterator[None]:
    """Calls `close` as soon as the client is gone, and in any case at the end."""
    watcher = asyncio.create_task(_watch(receive, close))
    try:
        yield
    finally:
        watcher.cancel()
        close()


async def _watch(receive: Receive, close: Callable[[], None]) -> None:
    with suppress(HTTPException):  # of a body over the bounds, where the route has read none
        while (await receive())["type"] != "http.disconnect":
            pass
    close()
