"""Writes to many connections one right behind the other, at the end of a turn of the event loop.

A write wakes its reader. Between writes that alternate with other work the readers go to sleep again, and caches get
cold: on a busy machine such writes took the system a tenth longer, and the whole process 3 to 6 %.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from quire.engine import clock

log = logging.getLogger("quire.server")

MOST_HELD = 16 * 1024
"""Bytes that a connection holds; what is more is written at once, so that backpressure is noticed."""

LINGER = 10.0
"""Seconds in which a client that still sends may read why nobody wants it."""
TRANSPORT = "quire.transport"
"""Names the BurstTransport of a connection of ours in the scope."""


def _is_sending_nothing() -> bool:
    return False


class Bursts:
    """The connections of a server that have something to write."""

    def __init__(self) -> None:
        self.waiting: list[BurstTransport] = []
        """While it is not empty, `write` will be called."""

    def write(self) -> None:
        """Write what all of them hold."""
        waiting, self.waiting = self.waiting, []
        for transport in waiting:
            try:
                transport.flush()
            except Exception:
                log.exception("a connection failed")  # which is no reason to lose what is for the others


class BurstTransport(asyncio.Transport):
    """A connection's transport that holds what is written until the loop's turn ends. It has what uvicorn uses."""

    __slots__ = ("_bursts", "_held", "_lingering", "_loop", "_sending", "_transport", "chunk_written", "writable")

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        bursts: Bursts,
        sending: Callable[[], bool] = _is_sending_nothing,
    ) -> None:
        """`sending`: whether the client is in the middle of a request."""
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._bursts = bursts
        self._sending = sending
        self._held = b""
        self._lingering = False
        """Whether nothing more is written, and what comes is only dropped."""
        self.writable = True
        """Whether the client is there and reads; kept by the connection."""
        self.chunk_written = 0.0
        """When a chunk was written last; a time of time.monotonic()."""

    def write_chunk(self, chunk: bytes) -> None:
        """Write a part of a body in chunked encoding, as ASGI's `send` does, without its checks, which take as long
        as making it. Only for a body that has begun, while the transport is writable."""
        if chunk:  # an empty one would be the end
            self.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            self.chunk_written = clock.monotonic()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._held:
            if not self._bursts.waiting:
                self._loop.call_soon(self._bursts.write)
            self._bursts.waiting.append(self)
        self._held += data
        if len(self._held) > MOST_HELD:
            self.flush()

    def flush(self) -> None:
        """Write what is held."""
        if self._held:
            held, self._held = self._held, b""
            if not self.is_closing():
                self._transport.write(held)

    def is_closing(self) -> bool:
        return self._lingering or self._transport.is_closing()

    def close(self) -> None:
        """At once, unless the client still sends. What it sends is then read a while longer: otherwise the system would
        reset the connection, and the client would lose the answer, too (RFC 9112, 9.6)."""
        self.flush()
        if self.is_closing() or not self._sending():
            return self._transport.close()
        self._lingering = True
        if self._transport.can_write_eof():  # TLS has no half that could be closed
            self._transport.write_eof()
        self._transport.resume_reading()
        self._loop.call_later(LINGER, self._transport.close)

    def abort(self) -> None:
        self._held = b""
        self._transport.abort()

    def end(self) -> None:
        """The connection is lost. Gives up what it refers to, which refers to this."""
        self.writable = False
        self._held = b""
        self._sending = _is_sending_nothing
