"""`python -m engine.boot ADDRESS PULSE_FD`: the engine process, the configuration as a line of JSON on standard input.

It imports torch last. Before that it starts what must work from the first moment on: the pulse by which the parent
knows that this process is alive, and the watch by which this process knows that the parent is.
"""

from __future__ import annotations

import os
import sys
import threading

from engine.pulse import Pulse


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
