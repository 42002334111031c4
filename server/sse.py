"""Server-sent events: one body chunk per engine step, comments during silences, and an end when the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from time import monotonic

from sse_starlette import EventSourceResponse
from starlette.types import Message, Receive, Scope, Send

from quire.server.bursts import BurstTransport
from quire.server.config import ServerConfig
from quire.server.encoding import PING
from quire.server.errors import stream_error

MEDIA = b"text/event-stream; charset=utf-8"
HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back to fill its buffers
)


class EventStream(EventSourceResponse):
    """Sends chunks as they come; each is one or more whole events, already encoded.

    `close` is called when the client disconnects and when the stream ends, and must end `chunks`. The status is sent
    with the first chunk, or with the first ping when none came for `config.sse_ping` seconds. An exception before that
    is raised, to get a status of its own; a later one is sent as the last event.

    The format, the settings and the listening for a disconnect are sse-starlette's. Its watch for uvicorn's shutdown is
    left out: HttpServer drains its streams before it stops.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes],
        close: Callable[[], None],
        headers: Mapping[str, str],
        config: ServerConfig,
        *,
        media: bytes = MEDIA,
        ping: bytes = PING,
        failed: Callable[[Exception], bytes] = stream_error,
        transport: BurstTransport | None = None,
    ) -> None:
        """`media`: the type of what is sent. `ping` is sent after a silence, `failed` writes the last event of a stream
        that an error ends. What makes the chunks may write some to `transport` itself, while it is asked for the
        next."""
        super().__init__(
            chunks,
            ping=config.sse_ping,
            client_close_handler_callable=self._on_disconnect,
        )
        # The base class would add `connection: keep-alive`, which HTTP/1.1 assumes and a closing server contradicts.
        self.raw_headers = [
            (b"content-type", media),
            *HEADERS,
            *((name.lower().encode(), value.encode()) for name, value in headers.items()),
        ]
        self._chunks = chunks
        self._close = close
        self._ping_event = ping
        self._failed = failed
        self._begun = False
        """Whether the status was sent."""
        self._sent = monotonic()
        self._transport = transport
        self._sending = asyncio.Lock()
        """Instead of the base class's, which is anyio's: a task that is cancelled while it waits for that one holds
        itself, and its answer, until a garbage collection."""

    @property
    def _last_sent(self) -> float:
        return self._sent if self._transport is None else max(self._sent, self._transport.chunk_written)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Replaces the base class's, whose group of four anyio tasks costs each stream 0.4 ms of the event loop."""
        stream = asyncio.create_task(self._send_chunks(send))
        tasks = [stream, asyncio.create_task(self._listen_for_disconnect(receive))]
        if self.ping_interval:
            tasks.append(asyncio.create_task(self._ping(send)))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what ended it
        finally:
            self._close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._chunks.aclose()
            self.client_close_handler_callable = None  # no circle: what the answer held goes with it
        await self._begin(send)  # for the log of requests, where the client left before the status

    async def _begin(self, send: Send) -> None:
        async with self._sending:
            if not self._begun:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                self._begun = True

    async def _send_chunks(self, send: Send) -> None:
        """Replaces the base class's _stream_response, which checks, logs and times each chunk: several microseconds
        per token."""
        last = b""
        try:
            async for chunk in self.body_iterator:
                if not self._begun:
                    await self._begin(send)
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                self._sent = monotonic()
        except Exception as error:
            async with self._sending:  # a ping may be sending the status
                if not self._begun:
                    raise
            last = self._failed(error)
        await self._begin(send)
        async with self._sending:
            self.active = False
            await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _ping(self, send: Send) -> None:
        """Replaces the base class's, which also pings between events that come all the time."""
        while True:
            silent = monotonic() - self._last_sent
            if silent < self.ping_interval:
                await asyncio.sleep(self.ping_interval - silent)
                continue
            await self._begin(send)
            async with self._sending:
                if self.active:
                    await send({"type": "http.response.body", "body": self._ping_event, "more_body": True})
            self._sent = monotonic()

    async def _on_disconnect(self, message: Message) -> None:
        self._close()


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
    while (await receive())["type"] != "http.disconnect":
        pass
    close()
