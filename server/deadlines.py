"""A request's deadlines: when one passes, its stream of outputs ends with an error."""

from __future__ import annotations

import asyncio

from engine.client import OutputStream
from engine.errors import QueueTimeout, Timeout


class Deadlines:
    """Of one job, in seconds from its submission; None: none. Call `cancel` when it is over."""

    def __init__(self, stream: OutputStream, *, timeout: float | None, queue_timeout: float | None) -> None:
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.passed: str | None = None
        """The parameter whose deadline ended the stream."""
        if timeout is not None:
            late = Timeout(f"the answer was not complete within timeout ({timeout:g} s)", param="timeout")
            self._set("timeout", timeout, late)
        if queue_timeout is not None:
            text = f"no token came within queue_timeout ({queue_timeout:g} s)"
            self._set("queue_timeout", queue_timeout, QueueTimeout(text, param="queue_timeout"))

    def _set(self, name: str, seconds: float, error: Timeout | QueueTimeout) -> None:
        self._timers[name] = self._loop.call_later(seconds, self._pass, name, error)

    def _pass(self, name: str, error: Timeout | QueueTimeout) -> None:
        if self._stream.give_up(error):
            self.passed = name

    def started(self) -> None:
        """The first token has come."""
        if "queue_timeout" in self._timers:
            self._timers.pop("queue_timeout").cancel()

    def cancel(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
