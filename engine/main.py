"""`python -m quire.engine.main ADDRESS HEARTBEAT_FD`: the engine process. It reads its configuration, a line of JSON,
from standard input.

It imports torch last. Before that it starts what must work from the first moment on: the heartbeat, by which the parent
knows that this process is alive; the thread that ends this process when the parent is gone; and the thread that tells
signals sent by other processes from this process's own faults.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

from quire.engine.client.exit_cause import FAULTS
from quire.engine.heartbeat import Heartbeat

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """The parent holds the other end of our standard input: when that closes, it is gone, and so are we.

    Linux ends us even when this thread cannot run, in a step that hangs.
    """

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def block_fault_signals() -> None:
    """Before any other thread starts: threads inherit it. The kernel still ends a process by its own faults, as it
    lets nobody put those off; only the same signals sent by a process wait for the fault-signals."""
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, FAULTS)


def report_fault_signals(heartbeat: Heartbeat) -> None:
    """Tell the parent who sends us such a signal, then die of it."""

    def wait() -> None:
        info = signal.sigwaitinfo(FAULTS)
        if info.si_code <= 0 and info.si_pid != os.getpid():  # above 0 the kernel sent it
            heartbeat.report_fault_signal(info.si_pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {info.si_signo})
        os.kill(os.getpid(), info.si_signo)

    if hasattr(signal, "sigwaitinfo"):
        threading.Thread(target=wait, name="fault-signals", daemon=True).start()


def first_line() -> bytes:
    """Of standard input, and not a byte more: what follows is the watcher's."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def main() -> None:
    address, descriptor = sys.argv[1], int(sys.argv[2])
    block_fault_signals()
    line = first_line()
    heartbeat = Heartbeat(descriptor)
    report_fault_signals(heartbeat)
    end_with_parent()

    from quire.engine.config import EngineConfig
    from quire.engine.loop import serve

    sys.exit(serve(EngineConfig.model_validate_json(line), address, heartbeat))


if __name__ == "__main__":
    main()
