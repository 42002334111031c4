"""`python -m engine.boot ADDRESS PULSE_FD`: the engine process, the configuration as a line of JSON on standard input.

It imports torch last. Before that it starts what must work from the first moment on: the pulse by which the parent
knows that this process is alive, and the watch by which this process knows that the parent is.
"""

from __future__ import annotations

import os
import sys
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


def end_with_parent() -> None:
    """The parent holds the other end of our standard input: when that closes, it is gone, and so are we."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def first_line() -> bytes:
    """Of standard input, and not a byte more: what follows is the watcher's."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def main() -> None:
    address, descriptor = sys.argv[1], int(sys.argv[2])
    line = first_line()
    pulse = Pulse(descriptor)
    end_with_parent()

    from engine.config import EngineConfig
    from engine.loop import serve

    sys.exit(serve(EngineConfig.model_validate_json(line), address, pulse))


if __name__ == "__main__":
    main()
