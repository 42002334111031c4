"""The pipe from the engine process to its parent. It carries heartbeats and short notes, each a line of JSON. A note
written before a crash still arrives. However the process ends, the pipe closes, and the parent notices.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from quire.engine.common import clock

_DEATH_SECONDS = 1.0
HEARTBEAT_SECONDS = 0.25


class Alive(msgspec.Struct, frozen=True, tag=True, array_like=True):
    stuck_ms: int
    """Milliseconds since the current step began or last made progress; 0 if there is no step."""


class RequestsBegan(msgspec.Struct, frozen=True, tag=True, array_like=True):
    ids: list[str]


class FaultSignal(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Says that the process `sender` sent a signal of FAULT_SIGNALS, which will end the engine."""

    sender: int


HeartbeatMessage = Alive | RequestsBegan | FaultSignal
decode_heartbeat = msgspec.json.Decoder(HeartbeatMessage).decode


class Heartbeat(ABC):
    @abstractmethod
    def begin_step(self, new_ids: Sequence[str]) -> None:
        """`new_ids`: requests that the step computes for the first time."""

    @abstractmethod
    def progress(self) -> None:
        """Notes that a part of the step, such as one layer, is done."""

    @abstractmethod
    def end_step(self) -> None: ...

    @abstractmethod
    def rank_ended(self, code: int) -> None:
        """Notes that another rank's process has ended. `code`: its return code, as in subprocess."""


class NullHeartbeat(Heartbeat):
    """For an engine in its client's process, which needs no watching."""

    def begin_step(self, new_ids: Sequence[str]) -> None:
        pass

    def progress(self) -> None:
        pass

    def end_step(self) -> None:
        pass

    def rank_ended(self, code: int) -> None:
        pass


class PipeHeartbeat(Heartbeat):
    """A thread sends heartbeats to the pipe `descriptor` as soon as this is constructed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._last_progress: float | None = None
        """time.monotonic() when the current step began or last made progress; None between steps."""
        threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True).start()

    def begin_step(self, new_ids: Sequence[str]) -> None:
        if new_ids:
            self._write(RequestsBegan(list(new_ids)))
        self._last_progress = clock.monotonic()

    def progress(self) -> None:
        # At startup the model also runs outside steps, to measure its memory.
        if self._last_progress is not None:
            self._last_progress = clock.monotonic()

    def end_step(self) -> None:
        self._last_progress = None

    def rank_ended(self, code: int) -> None:
        """Ends this process in the way in which the rank ended, so that the parent decides about both alike."""
        if code < 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
            os.kill(os.getpid(), -code)
            time.sleep(_DEATH_SECONDS)
        os._exit(max(code, 1))

    def report_fault_signal(self, sender: int) -> None:
        self._write(FaultSignal(sender))

    def _send_heartbeats(self) -> None:
        while True:
            last = self._last_progress
            self._write(Alive(0 if last is None else max(1, int((clock.monotonic() - last) * 1000))))
            time.sleep(HEARTBEAT_SECONDS)

    def _write(self, message: HeartbeatMessage) -> None:
        try:
            with self._lock:
                os.write(self._descriptor, msgspec.json.encode(message) + b"\n")
        except OSError:  # the parent is gone
            os._exit(0)
