"""The deadlines of a call."""

from __future__ import annotations

import asyncio

from quire.engine.client.output_stream import OutputStream
from quire.engine.common.errors import QueueTimeout, Timeout


class Deadlines:
    """Ends the stream of outputs with an error when a deadline passes. Both deadlines are in seconds from now; None: no
    deadline. Call `cancel_timers` when the call is over."""

    def __init__(self, stream: OutputStream, *, timeout: float | None, queue_timeout: float | None) -> None:
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.expired_param: str | None = None
        """The parameter whose deadline ended the stream."""
        if timeout is not None:
            late = Timeout(f"the answer was not complete within timeout ({timeout:g} s)", param="timeout")
            self._start_timer("timeout", timeout, late)
        if queue_timeout is not None:
            text = f"no token came within queue_timeout ({queue_timeout:g} s)"
            self._start_timer("queue_timeout", queue_timeout, QueueTimeout(text, param="queue_timeout"))

    def _start_timer(self, name: str, seconds: float, error: Timeout | QueueTimeout) -> None:
        self._timers[name] = self._loop.call_later(seconds, self._expire, name, error)

    def _expire(self, name: str, error: Timeout | QueueTimeout) -> None:
        if self._stream.give_up(error):
            self.expired_param = name

    def stop_queue_timer(self) -> None:
        """The first token has come: the deadline of the queue is over."""
        if "queue_timeout" in self._timers:
            self._timers.pop("queue_timeout").cancel()

    def cancel_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
