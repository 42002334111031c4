"""What the engine process tells its parent even if it dies the next moment: lines of JSON on a pipe.

The pipe closes with the process, however it ends, and that tells the parent too.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

import msgspec

HEARTBEAT_SECONDS = 0.25


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life, a few times a second."""

    stuck_ms: int
    """Milliseconds since the current step began or last made progress; 0: no step runs."""


class RequestsBegan(msgspec.Struct, frozen=True, tag=True):
    """These requests are about to be computed for the first time."""

    ids: list[str]


class FaultSignal(msgspec.Struct, frozen=True, tag=True):
    """A process has sent this one a deadly signal."""

    sender: int


HeartbeatMessage = Beat | RequestsBegan | FaultSignal
decode_heartbeat = msgspec.json.Decoder(HeartbeatMessage).decode


class NoHeartbeat:
    """The heartbeat of an engine that has no process of its own."""

    def begin_step(self, new_ids: Sequence[str]) -> None:
        """A step is about to run; the requests of `new_ids` are in one for the first time."""

    def progress(self) -> None:
        """A part of the step is done."""

    def end_step(self) -> None: ...


class Heartbeat(NoHeartbeat):
    """Writes to `descriptor`, and beats from now on in a thread of its own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._moved: float | None = None
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def begin_step(self, new_ids: Sequence[str]) -> None:
        if new_ids:
            self._tell(RequestsBegan(list(new_ids)))
        self._moved = time.monotonic()

    def progress(self) -> None:
        if self._moved is not None:  # a model computes outside steps too: its memory is measured when it starts
            self._moved = time.monotonic()

    def end_step(self) -> None:
        self._moved = None

    def report_fault_signal(self, sender: int) -> None:
        self._tell(FaultSignal(sender))

    def _beat(self) -> None:
        while True:
            moved = self._moved
            self._tell(Beat(0 if moved is None else max(1, int((time.monotonic() - moved) * 1000))))
            time.sleep(HEARTBEAT_SECONDS)

    def _tell(self, sign: HeartbeatMessage) -> None:
        try:
            with self._lock:
                os.write(self._descriptor, msgspec.json.encode(sign) + b"\n")
        except OSError:  # nobody reads any more
            os._exit(0)
