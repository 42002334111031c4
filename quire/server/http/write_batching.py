"""Writes to many connections one right behind the other, at the end of a turn of the event loop.

A write wakes its reader. Between writes that alternate with other work the readers go to sleep again, and caches get
cold: on a busy machine such writes took the system a tenth longer, and the whole process 3 to 6 %.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from quire.engine.common import clock

log = logging.getLogger("quire.server")

MAX_BUFFERED_BYTES = 16 * 1024
"""Bytes that a connection holds; what is more is written at once, so that backpressure is noticed."""

LINGER_SECONDS = 10.0
"""Seconds in which a client that still sends may read why nobody wants it."""
TRANSPORT_SCOPE_KEY = "quire.transport"
"""Names the BatchingTransport of a connection of ours in the scope."""


def _always_false() -> bool:
    return False


class WriteBatcher:
    """The connections of a server that have something to write."""

    def __init__(self) -> None:
        self.waiting_transports: list[BatchingTransport] = []
        """While it is not empty, `flush_all` will be called."""

    def flush_all(self) -> None:
        """Write what all of them hold."""
        waiting, self.waiting_transports = self.waiting_transports, []
        for transport in waiting:
            try:
                transport.flush_buffer()
            except Exception:
                log.exception("a connection failed")  # which is no reason to lose what is for the others


class BatchingTransport(asyncio.Transport):
    """A connection's transport that holds what is written until the loop's turn ends. It has what uvicorn uses."""

    __slots__ = (
        "_buffer",
        "_is_client_sending",
        "_is_lingering",
        "_loop",
        "_transport",
        "_write_batcher",
        "last_chunk_time",
        "writable",
    )

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        write_batcher: WriteBatcher,
        is_client_sending: Callable[[], bool] = _always_false,
    ) -> None:
        """`is_client_sending`: whether the client is in the middle of a request."""
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._write_batcher = write_batcher
        self._is_client_sending = is_client_sending
        self._buffer = b""
        self._is_lingering = False
        """Whether nothing more is written, and what comes is only dropped."""
        self.writable = True
        """Whether the client is there and reads; kept by the connection."""
        self.last_chunk_time = 0.0
        """When a chunk was written last; a time of time.monotonic()."""

    def write_chunk(self, chunk: bytes) -> None:
        """Write a part of a body in chunked encoding, as ASGI's `send` does, without its checks, which take as long
        as making it. Only for a body that has begun, while the transport is writable."""
        if chunk:  # an empty one would be the end
            self.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            self.last_chunk_time = clock.monotonic()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._buffer:
            if not self._write_batcher.waiting_transports:
                self._loop.call_soon(self._write_batcher.flush_all)
            self._write_batcher.waiting_transports.append(self)
        self._buffer += data
        if len(self._buffer) > MAX_BUFFERED_BYTES:
            self.flush_buffer()

    def flush_buffer(self) -> None:
        """Write what is held."""
        if self._buffer:
            held, self._buffer = self._buffer, b""
            if not self.is_closing():
                self._transport.write(held)

    def is_closing(self) -> bool:
        return self._is_lingering or self._transport.is_closing()

    def close(self) -> None:
        """At once, unless the client still sends. What it sends is then read a while longer: otherwise the system would
        reset the connection, and the client would lose the answer, too (RFC 9112, 9.6)."""
        self.flush_buffer()
        if self.is_closing() or not self._is_client_sending():
            return self._transport.close()
        self._is_lingering = True
        if self._transport.can_write_eof():  # TLS has no half that could be closed
            self._transport.write_eof()
        self._transport.resume_reading()
        self._loop.call_later(LINGER_SECONDS, self._transport.close)

    def abort(self) -> None:
        self._buffer = b""
        self._transport.abort()

    def release_references(self) -> None:
        """The connection is lost. Gives up what it refers to, which refers to this."""
        self.writable = False
        self._buffer = b""
        self._is_client_sending = _always_false
