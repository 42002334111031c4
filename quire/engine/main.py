"""`python -m quire.engine.main ADDRESS HEARTBEAT_FD`: the engine process. Its configuration is a line of JSON on stdin.

Torch is imported last. Before that, three threads must send heartbeats to the parent, exit when the parent is gone, and
distinguish other processes' signals from this process's own faults.
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
    """Make FAULT_SIGNALS that other processes send wait for `start_fault_signal_reporter`.

    Call this before other threads start, because they inherit the signal mask.
    """
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, FAULT_SIGNALS)


def start_fault_signal_reporter(heartbeat: PipeHeartbeat) -> None:
    """Start a thread that reports a fault signal's sender to the parent, and then lets the signal end the process."""

    def report_signal() -> None:
        info = signal.sigwaitinfo(FAULT_SIGNALS)
        # si_code is above 0 if the kernel sent the signal, and at most 0 if a process did (man 2 sigaction).
        if info.si_code <= 0 and info.si_pid != os.getpid():
            heartbeat.report_fault_signal(info.si_pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {info.si_signo})
        os.kill(os.getpid(), info.si_signo)

    if hasattr(signal, "sigwaitinfo"):
        threading.Thread(target=report_signal, name="fault-signal-reporter", daemon=True).start()


def run_node(config: EngineConfig) -> int:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else PyTorch prints a page of warnings when machine 0 ends
    from quire.engine.worker_node import run_worker_node_until_signal

    return run_worker_node_until_signal(config)


def main() -> None:
    address, descriptor = sys.argv[1], int(sys.argv[2])
    faulthandler.register(signal.SIGUSR1)
    block_fault_signals()
    line = read_configuration()
    heartbeat = PipeHeartbeat(descriptor)
    start_fault_signal_reporter(heartbeat)
    end_with_parent()

    from quire.engine.common.config import EngineConfig

    config = EngineConfig.model_validate_json(line)
    os.nice(config.niceness)  # applies to this thread and to threads started later

    from quire.engine.engine_core_process import run_engine_core

    sys.exit(run_engine_core(config, address, heartbeat))


if __name__ == "__main__":
    main()
