"""The engine process's sign of life."""

from __future__ import annotations

import os
import threading
import time

PULSE_SECONDS = 0.25


class Pulse:
    """Tells the parent, a few times a second, for how many milliseconds the current step has run (0: none runs).

    The file descriptor closes with this process, however it ends, and that tells the parent too.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._began: float | None = None
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def begin_step(self) -> None:
        self._began = time.monotonic()

    def end_step(self) -> None:
        self._began = None

    def _beat(self) -> None:
        while True:
            began = self._began
            elapsed = 0 if began is None else int((time.monotonic() - began) * 1000)
            try:
                os.write(self._descriptor, b"%d\n" % elapsed)
            except OSError:  # nobody reads any more
                os._exit(0)
            time.sleep(PULSE_SECONDS)
