"""A ZeroMQ socket between two processes of ours, on one machine."""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio

from quire.engine.common import clock
from quire.engine.common.errors import EngineError

MOST_IN_TURN = 16
"""Messages that are received before others get a turn."""
LONGEST_TURN = 0.01
"""Seconds after which others get a turn even if fewer messages have been received."""


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
        self._turn_began = 0.0
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
        """Returns the frames of the next message. Several waiting messages are received in one turn of the event loop,
        so that a server that is behind its engine sends the tokens of several steps together. MOST_IN_TURN and
        LONGEST_TURN limit the turn, because the caller handles each message before it asks for the next one."""
        is_turn_over = self._in_turn == MOST_IN_TURN or clock.monotonic() - self._turn_began > LONGEST_TURN
        if is_turn_over or not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._in_turn = 0
            await asyncio.sleep(0)  # a message that has already arrived is received without a turn for anybody else
        frames: list[bytes] = await self._socket.recv_multipart()
        if not self._in_turn:
            self._turn_began = clock.monotonic()
        self._in_turn += 1
        return frames
