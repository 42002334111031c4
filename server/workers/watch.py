"""The deadline of every wait for a worker and for the process that forks workers.

A worker's processor time is limited, but a process that is stopped, or waits forever in a library, uses none. The time
that a job takes by the clock says little: on a busy machine a worker computes, at its niceness, for a small part of the
time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from quire.engine.processes.procfs import Standstill

STILL_SECONDS = 5.0
"""A process is killed that does nothing for so long, though it was asked for something and could compute."""
_LOOK_SECONDS = 0.25


class Watch:
    """Watches one process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.has_killed = False

    async def run(self) -> None:
        await asyncio.sleep(_LOOK_SECONDS)  # most jobs have ended by then
        standstill, last = Standstill(self._pid), time.monotonic()
        seconds = 0.0
        while seconds < STILL_SECONDS:
            await asyncio.sleep(_LOOK_SECONDS)
            # Where it was this process that could not run, the other one may have been stopped with it.
            last, elapsed = time.monotonic(), min(time.monotonic() - last, 2 * _LOOK_SECONDS)
            seconds = standstill.advance(elapsed)
        self.has_killed = True
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


@contextmanager
def watched(pid: int) -> Iterator[Watch]:
    """Within the block, which waits for this process, it is killed when it stands still."""
    watch = Watch(pid)
    task = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        task.cancel()
