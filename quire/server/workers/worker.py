"""`python -m quire.server.workers.worker FD`: a process that loads what turns text into tokens once, and forks workers.

A forked worker shares that memory and starts within milliseconds, so one that takes too much time or memory, or whose
caller has left, is simply killed. FD is a socket: first comes a ServedModelSpec, then the end of a new worker's own
socket for each worker to fork. The process ends with the server, and its workers with it."""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.engine.common.errors import QuireError
from quire.engine.images.image_decoding import preload_decoders
from quire.server.config import ServerConfig
from quire.server.resolve import invocations  # noqa: F401 - what jobs need is there before workers are forked
from quire.server.served_model import ServedModel, ServedModelSpec
from quire.server.workers.frames import receive_frame_blocking, send_frame_blocking

JobFunction = Callable[[bytes, ServedModel, ServerConfig], Any]

NICENESS = 5
"""Below the server and its engine: streams come before requests that begin."""
_MAX_GROWTH_BYTES = 48 << 20
"""A worker that has grown by more than this ends behind its answer; a new one is small again."""


@dataclass(frozen=True, slots=True)
class JobLimits:
    cpu_seconds: float
    """Of processor time."""
    memory_bytes: int
    """Bytes that the worker may grow by."""


@dataclass(frozen=True, slots=True)
class WorkerJob:
    work: JobFunction
    """A function of a module, which is sent by its name."""
    limits: JobLimits
    adapters: Sequence[str] = ()
    """ServedModel.adapters, as they are now."""


def run_fork_server(control: socket.socket) -> None:
    os.nice(NICENESS)
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # a terminal sends them to the whole group
        signal.signal(ignored, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers' exit statuses
    source, _ = receive_frame_blocking(control)
    assert isinstance(source, ServedModelSpec)
    adapters: list[str] = []
    model = source.build_served_model(expendable=True, adapters=adapters)
    if model.multimodal_prompt_builder is not None:
        preload_decoders()
    gc.collect()
    gc.freeze()
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:  # the server is gone
            return
        if os.fork() == 0:
            control.close()
            run_worker(socket.socket(fileno=descriptors[0]), model, adapters, source.config)
            os._exit(0)
        os.close(descriptors[0])


def run_worker(connection: socket.socket, model: ServedModel, adapters: list[str], config: ServerConfig) -> None:
    """Answer jobs until the server hangs up: each with (True, its result), (False, error), or (None, a traceback), and
    whether the worker stays for more. `adapters`: the model's."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # a native library says there that memory is short
    initial_bytes = private_memory_bytes()
    try:
        send_frame_blocking(connection, os.getpid())
        while True:
            job, body = receive_frame_blocking(connection)
            adapters[:] = job.adapters
            answer = _run_job(job, body, model, config, initial_bytes)
            is_reusable = private_memory_bytes() - initial_bytes <= _MAX_GROWTH_BYTES
            send_frame_blocking(connection, (*answer, is_reusable))
            if not is_reusable:
                return
            del body, answer
    except (EOFError, ConnectionError):
        return


def _run_job(
    job: WorkerJob, body: bytes, model: ServedModel, config: ServerConfig, initial_bytes: int
) -> tuple[bool | None, Any]:
    resource.setrlimit(
        resource.RLIMIT_DATA, (initial_bytes + job.limits.memory_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1])
    )
    # The timer's signal, SIGPROF, ends the process by default, even inside native code.
    signal.setitimer(signal.ITIMER_PROF, job.limits.cpu_seconds)
    try:
        return True, job.work(body, model, config)
    except QuireError as error:
        return False, error
    except MemoryError:
        os._exit(1)
    except Exception:
        return None, traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def private_memory_bytes() -> int:
    """Bytes of memory that this process alone can write to: what RLIMIT_DATA limits."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmData:")[2].split()[0]) * 1024


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads do not survive a fork
    run_fork_server(socket.socket(fileno=int(sys.argv[1])))
