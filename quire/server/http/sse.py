"""Server-sent events: a body chunk per engine step, pings during silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from sse_starlette import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from quire.engine.common import clock
from quire.server.config import ServerConfig
from quire.server.encoding import PING_EVENT
from quire.server.error_responses import encode_openai_stream_error
from quire.server.http.write_batching import BatchingTransport

Result = TypeVar("Result")
CLIENT_CLOSED_REQUEST = 499
EVENT_STREAM_TYPE = b"text/event-stream; charset=utf-8"
EVENT_STREAM_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise nginx buffers events
)


class EventStream(EventSourceResponse):
    """Each chunk is one or more whole, encoded events. A disconnect and the stream's end call `close`, which must end
    `chunks`.
    The status is sent with the first chunk, or with the first ping after `config.sse_ping` seconds. An exception before
    that is raised and gets its own status; a later one becomes the last event.
    sse-starlette's `__call__` would send the status before the first chunk, ping between frequent events, end streams
    that HttpServer drains, and take 0.4 ms per stream and microseconds per token.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes],
        close: Callable[[], None],
        headers: Mapping[str, str],
        config: ServerConfig,
        *,
        content_type: bytes = EVENT_STREAM_TYPE,
        ping: bytes = PING_EVENT,
        encode_error: Callable[[Exception], bytes] = encode_openai_stream_error,
        transport: BatchingTransport | None = None,
    ) -> None:
        """`ping` is sent after a silence of `config.sse_ping` seconds. While the next chunk is awaited, the generator
        may write chunks to `transport` itself.
        """
        super().__init__(chunks, ping=config.sse_ping)
        extra_headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        self.raw_headers = [(b"content-type", content_type), *EVENT_STREAM_HEADERS, *extra_headers]
        self._chunks = chunks
        self._close = close
        self._ping_event = ping
        self._encode_error = encode_error
        self._status_sent = False
        self._last_send_time = clock.monotonic()
        self._transport = transport
        self._status_lock = asyncio.Lock()

    @property
    def _last_activity(self) -> float:
        return (
            self._last_send_time
            if self._transport is None
            else max(self._last_send_time, self._transport.last_chunk_time)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks = [
            asyncio.create_task(self._send_chunks(send)),
            asyncio.create_task(_close_when_disconnected(receive, self._close)),
        ]
        if self.ping_interval:
            tasks.append(asyncio.create_task(self._ping(send)))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises the task's error
        finally:
            self._close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._chunks.aclose()
        await self._send_status(send)  # the request log needs a status even if the client left before it

    async def _send_status(self, send: Send) -> None:
        async with self._status_lock:
            if not self._status_sent:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                self._status_sent = True

    async def _send_chunks(self, send: Send) -> None:
        last_event = b""
        try:
            async for chunk in self._chunks:
                if not self._status_sent:
                    await self._send_status(send)
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                self._last_send_time = clock.monotonic()
        except Exception as error:
            async with self._status_lock:  # a ping may be sending the status
                if not self._status_sent:
                    raise
            last_event = self._encode_error(error)
        await self._send_status(send)
        async with self._status_lock:
            self.active = False
            await send({"type": "http.response.body", "body": last_event, "more_body": False})

    async def _ping(self, send: Send) -> None:
        while True:
            silent = clock.monotonic() - self._last_activity
            if silent < self.ping_interval:
                await asyncio.sleep(self.ping_interval - silent)
                continue
            await self._send_status(send)
            async with self._status_lock:
                if self.active:
                    await send({"type": "http.response.body", "body": self._ping_event, "more_body": True})
            self._last_send_time = clock.monotonic()


@asynccontextmanager
async def closing_on_disconnect(receive: Receive, close: Callable[[], None]) -> AsyncIterator[None]:
    watcher = asyncio.create_task(_close_when_disconnected(receive, close))
    try:
        yield
    finally:
        watcher.cancel()
        close()


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """If the client leaves first, cancels `work` and raises HTTPException."""
    task = asyncio.create_task(work)

    def cancel_task() -> None:
        task.cancel()

    async with closing_on_disconnect(receive, cancel_task):
        await asyncio.wait([task])
    if task.cancelled():
        raise HTTPException(CLIENT_CLOSED_REQUEST)
    return task.result()


async def _close_when_disconnected(receive: Receive, close: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    close()
