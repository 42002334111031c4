from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio

from quire.engine.common import clock
from quire.engine.common.errors import EngineError

MOST_IN_TURN = 16
"""Number of messages after which other tasks get to run."""
LONGEST_TURN = 0.01
"""Seconds after which other tasks get to run."""


class Wire:
    """A ZeroMQ socket between two processes on one machine. Its queues are unlimited, so sending never blocks. Messages
    to a process that has ended are dropped.
    """

    def __init__(self, kind: int, *, linger_ms: int = 0, identity: bytes = b"") -> None:
        """`linger_ms`: milliseconds for sending the last messages after closing."""
        self._socket = zmq.asyncio.Context.instance().socket(kind)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, linger_ms)):
            self._socket.set(option, value)
        if identity:
            self._socket.set(zmq.IDENTITY, identity)
        if kind == zmq.ROUTER:
            # A process that cannot start reports this over a second connection of the same identity.
            self._socket.set(zmq.ROUTER_HANDOVER, 1)
        self._in_turn = 0
        self._turn_began = 0.0
        self.close = self._socket.close
        self.connect = self._socket.connect

    def bind(self, address: str) -> None:
        """Raises EngineError if no socket can be created."""
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise EngineError(f"TMPDIR: no socket can be created in it: {error.strerror}") from None

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)  # never blocks, because the returned future is already done

    async def receive(self) -> list[bytes]:
        """One iteration of the event loop receives several waiting messages, so a server that lags behind its engine
        sends the tokens of several steps together. MOST_IN_TURN and LONGEST_TURN limit that.
        """
        is_turn_over = self._in_turn == MOST_IN_TURN or clock.monotonic() - self._turn_began > LONGEST_TURN
        if is_turn_over or not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._in_turn = 0
            await asyncio.sleep(0)  # receiving a waiting message does not let other tasks run
        frames: list[bytes] = await self._socket.recv_multipart()
        if not self._in_turn:
            self._turn_began = clock.monotonic()
        self._in_turn += 1
        return frames
