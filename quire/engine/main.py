"""`python -m quire.engine.main ADDRESS HEARTBEAT_FD`: the engine process.

It reads its configuration, one line of JSON, from standard input. It imports torch last, because three threads must
work from the first moment on: one sends heartbeats, by which the parent knows that this process is alive; one ends this
process when the parent is gone; one distinguishes signals sent by other processes from this process's own faults.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

from quire.engine.processes.child import end_with_parent, read_configuration
from quire.engine.processes.exit_cause import FAULT_SIGNALS
from quire.engine.processes.heartbeat import PipeHeartbeat

if TYPE_CHECKING:
    from quire.engine.common.config import EngineConfig


def block_fault_signals() -> None:
    """Block FAULT_SIGNALS, so that those sent by other processes wait for `start_fault_signal_reporter`.

    Call it before any other thread starts: threads inherit the signal mask. A fault of this process itself still ends
    it at once, because the kernel does not let a process block signals that its own instructions raise.
    """
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, FAULT_SIGNALS)


def start_fault_signal_reporter(heartbeat: PipeHeartbeat) -> None:
    """Start a thread that waits for one of FAULT_SIGNALS, reports its sender to the parent, and lets it end us."""

    def report_signal() -> None:
        info = signal.sigwaitinfo(FAULT_SIGNALS)
        # si_code is above 0 when the kernel sent the signal, and 0 or below when a process did (man 2 sigaction).
        if info.si_code <= 0 and info.si_pid != os.getpid():
            heartbeat.report_fault_signal(info.si_pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {info.si_signo})
        os.kill(os.getpid(), info.si_signo)

    if hasattr(signal, "sigwaitinfo"):
        threading.Thread(target=report_signal, name="fault-signal-reporter", daemon=True).start()


def run_node(config: EngineConfig) -> int:
    """Compute with the first of several machines, in this process; see engine/worker_node.py."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns, a page long, each time that the first one ends
    from quire.engine.worker_node import run_worker_node_until_signal

    return run_worker_node_until_signal(config)


def main() -> None:
    address, descriptor = sys.argv[1], int(sys.argv[2])
    faulthandler.register(signal.SIGUSR1)  # to the server's standard error, as all that is written there
    block_fault_signals()
    line = read_configuration()
    heartbeat = PipeHeartbeat(descriptor)
    start_fault_signal_reporter(heartbeat)
    end_with_parent()

    from quire.engine.common.config import EngineConfig

    config = EngineConfig.model_validate_json(line)
    os.nice(config.niceness)  # of this thread, and those that it starts from here on: all that compute

    from quire.engine.engine_core_process import run_engine_core

    sys.exit(run_engine_core(config, address, heartbeat))


if __name__ == "__main__":
    main()
