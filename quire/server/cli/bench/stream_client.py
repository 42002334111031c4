"""An HTTP/1.1 client for server-sent events. It is cheap, because it usually shares the server's processor."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools

from quire.server.cli.server_client import API_KEY_HINT, normalize_server_url

TIMEOUT_SECONDS = 1800.0
MAX_ERROR_CHARACTERS = 200


class StreamError(Exception):
    """`status` is None if there was no HTTP response."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class StreamClient:
    def __init__(
        self,
        base: str,
        api_key: str | None = None,
        *,
        keep_alive: bool = True,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        """`base` may end in /v1. If `trust` is None, the system's certificates are trusted. Raises ConfigError."""
        parts = urlsplit(normalize_server_url(base))
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
        self._idle_connections: list[_StreamConnection] = []

    async def post_stream(self, path: str, body: bytes, on_event: Callable[[bytes], None]) -> None:
        """Posts to /v1/`path`. Calls `on_event` for each event before [DONE], in the transport's callback. Raises
        StreamError, also if `on_event` raises ValueError.
        """
        head = f"POST {self._prefix}/{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        while True:
            idle_connection = self._take_idle_connection()
            connection = idle_connection or await self._open_connection()
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    await connection.post_request(head.encode() + body, on_event)
            except TimeoutError:
                raise StreamError(f"no end of the answer after {TIMEOUT_SECONDS:g} s") from None
            except StreamError:
                if idle_connection is None or idle_connection.has_received:
                    raise
                continue  # the server just closed the connection: try another
            finally:
                if self._keep_alive and connection.is_reusable:
                    self._idle_connections.append(connection)
                else:
                    connection.close()
            return

    def close(self) -> None:
        for connection in self._idle_connections:
            connection.close()
        self._idle_connections.clear()

    def _take_idle_connection(self) -> _StreamConnection | None:
        while self._idle_connections:
            connection = self._idle_connections.pop()
            if connection.is_reusable:
                return connection
        return None

    async def _open_connection(self) -> _StreamConnection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_StreamConnection, *self._address, ssl=self._tls)
        except OSError as error:
            raise StreamError(f"cannot connect: {error.strerror or error}") from None
        return connection


class _StreamConnection(asyncio.Protocol):
    def __init__(self) -> None:
        self.has_received = False
        self.is_reusable = False
        self._end_future: asyncio.Future[None] | None = None

    async def post_request(self, request: bytes, on_event: Callable[[bytes], None]) -> None:
        self.has_received = self.is_reusable = self._saw_done_event = self._is_complete = False
        self._on_event = on_event
        self._buffer = b""
        self._parser = httptools.HttpResponseParser(self)
        self._end_future = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._end_future

    def close(self) -> None:
        self.is_reusable = False
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        """Without an earlier [DONE], the request fails with StreamError."""
        self.is_reusable = False
        self._resolve_response_future("the connection was closed before the end of the answer")

    def data_received(self, data: bytes) -> None:
        self.has_received = True
        try:
            self._parser.feed_data(data)
            if self._parser.get_status_code() == 200:
                self._read_events()
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, ValueError) as error:
            self._resolve_response_future(str(error) or "not HTTP", failed=True)
            self.close()
        if self._is_complete:
            self._resolve_response_future("the stream ended without [DONE]")

    def on_body(self, data: bytes) -> None:
        self._buffer += data

    def on_message_complete(self) -> None:
        self._is_complete = True
        self.is_reusable = self._parser.should_keep_alive()  # known only during the callback

    def _read_events(self) -> None:
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                self._saw_done_event = True
            else:
                self._on_event(data)

    def _resolve_response_future(self, missing: str, *, failed: bool = False) -> None:
        if self._end_future is None or self._end_future.done():
            return
        status = (self._parser.get_status_code() or None) if self.has_received else None
        if status not in (None, 200):
            text = self._buffer.decode(errors="replace").strip()[:MAX_ERROR_CHARACTERS]
            text += f" ({API_KEY_HINT})" if status == 401 else ""
            self._end_future.set_exception(StreamError(f"HTTP {status} {text}".rstrip(), status))
        elif failed or not self._saw_done_event:
            self._end_future.set_exception(StreamError(missing[:MAX_ERROR_CHARACTERS], status))
        else:
            self._end_future.set_result(None)
