"""A cheap HTTP/1.1 client for streams of server-sent events.

The benchmark usually runs on the same processor as the server that it measures, so it must take little time itself. A
general client spends awaits and copies on every chunk. Here a chunk is read in the transport's callback, and the
request's task wakes up only once, at the end.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools

from quire.server.cli.connect import server_url

TIMEOUT_SECONDS = 1800.0
ERROR_CHARACTERS = 200


class StreamError(Exception):
    """A request did not get a complete stream. `status` is None if there was no HTTP response."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class StreamClient:
    """Posts to one server. keep_alive: connections are used again if the server keeps them open."""

    def __init__(
        self,
        base: str,
        api_key: str | None = None,
        *,
        keep_alive: bool = True,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        """`base` may end in /v1 or not. `trust`: of certificates; None: the system's. Raises ConfigError if it is no
        server's URL."""
        parts = urlsplit(server_url(base))
        assert parts.hostname is not None
        self._address = (parts.hostname, parts.port or {"http": 80, "https": 443}[parts.scheme])
        self._tls = (trust or True) if parts.scheme == "https" else None
        self._prefix = parts.path + "/v1"
        self._headers = f"Host: {parts.netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\n"
        if api_key:
            self._headers += f"Authorization: Bearer {api_key}\r\n"
        if not keep_alive:
            self._headers += "Connection: close\r\n"
        self._keep_alive = keep_alive
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes, on_event: Callable[[bytes], None]) -> None:
        """Post JSON to /v1/`path`, and call `on_event` with the data of each event up to [DONE], which must come.

        `on_event` is called from the transport's callback; a ValueError that it raises ends the stream.
        Raises StreamError.
        """
        head = f"POST {self._prefix}/{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        while True:
            kept = self._take()
            connection = kept or await self._connect()
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    await connection.exchange(head.encode() + body, on_event)
            except TimeoutError:
                raise StreamError(f"no end of the answer after {TIMEOUT_SECONDS:g} s") from None
            except StreamError:
                if kept is None or kept.received:
                    raise
                continue  # the server closed an idle connection at that moment: try again with another one
            finally:
                if self._keep_alive and connection.reusable:
                    self._idle.append(connection)
                else:
                    connection.close()
            return

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _take(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, *self._address, ssl=self._tls)
        except OSError as error:
            raise StreamError(f"cannot connect: {error.strerror or error}") from None
        return connection


class _Connection(asyncio.Protocol):
    """One connection, for one request at a time."""

    def __init__(self) -> None:
        self.received = False
        """Whether bytes of the current response have arrived."""
        self.reusable = False
        """Whether another request can be sent on this connection."""
        self._end: asyncio.Future[None] | None = None

    async def exchange(self, request: bytes, on_event: Callable[[bytes], None]) -> None:
        self.received = self.reusable = self._done = self._complete = False
        self._on_event = on_event
        self._buffer = b""
        self._parser = httptools.HttpResponseParser(self)
        self._end = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._end

    def close(self) -> None:
        self.reusable = False
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass of it

    def connection_lost(self, error: Exception | None) -> None:
        """End the exchange: a response with neither a length nor chunks ends when its connection is closed."""
        self.reusable = False
        self._finish("the connection was closed before the end of the answer")

    def data_received(self, data: bytes) -> None:
        self.received = True
        try:
            self._parser.feed_data(data)
            if self._parser.get_status_code() == 200:
                self._read_events()
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, ValueError) as error:
            self._finish(str(error) or "not HTTP", failed=True)
            self.close()
        if self._complete:
            self._finish("the stream ended without [DONE]")

    def on_body(self, data: bytes) -> None:
        self._buffer += data

    def on_message_complete(self) -> None:
        self._complete = True
        self.reusable = self._parser.should_keep_alive()  # the parser knows this only until the callback returns

    def _read_events(self) -> None:
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                self._done = True
            else:
                self._on_event(data)

    def _finish(self, missing: str, *, failed: bool = False) -> None:
        """End the exchange. `missing` is the error message if the stream is incomplete or has failed."""
        if self._end is None or self._end.done():
            return
        status = (self._parser.get_status_code() or None) if self.received else None
        if status not in (None, 200):
            text = self._buffer.decode(errors="replace").strip()[:ERROR_CHARACTERS]
            self._end.set_exception(StreamError(f"HTTP {status} {text}".rstrip(), status))
        elif failed or not self._done:
            self._end.set_exception(StreamError(missing[:ERROR_CHARACTERS], status))
        else:
            self._end.set_result(None)
