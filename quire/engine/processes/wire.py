"""A ZeroMQ socket between two processes of ours, on one machine."""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio

from quire.engine.errors import EngineError

MOST_IN_TURN = 16
"""Messages that are received before others get a turn."""


class Wire:
    """Its queues are unlimited, so that sending never blocks; what is sent to a process that has ended is dropped."""

    def __init__(self, kind: int, *, linger_ms: int = 0, identity: bytes = b"") -> None:
        """linger_ms: how long the last message may take when the wire is closed."""
        self._socket = zmq.asyncio.Context.instance().socket(kind)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, linger_ms)):
            self._socket.set(option, value)
        if identity:
            self._socket.set(zmq.IDENTITY, identity)
        if kind == zmq.ROUTER:
            self._socket.set(zmq.ROUTER_HANDOVER, 1)  # a process that cannot start says so over another connection
        self._in_turn = 0
        """Messages received in this turn of the event loop."""
        self.close = self._socket.close
        self.connect = self._socket.connect

    def bind(self, address: str) -> None:
        """Raises EngineError where there can be no socket."""
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise EngineError(f"TMPDIR: no socket can be made in it: {error.strerror}") from None

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)  # as it never blocks, the future that this returns is done already

    async def receive(self) -> list[bytes]:
        """The frames of the next message. Messages that are there together are taken in one turn of the loop, some at
        most: so a server that is behind its engine sends the tokens of several steps together."""
        self._in_turn += 1
        if self._in_turn == MOST_IN_TURN or not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._in_turn = 0
            await asyncio.sleep(0)  # receiving what is there already would give nobody else a turn
        found: list[bytes] = await self._socket.recv_multipart()
        return found
