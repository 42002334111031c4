"""`python -m quire.server.workers.worker FD`: loads what turns text into tokens, and forks body workers. Workers share
that memory and start within milliseconds, so a worker that takes too much time or memory, or has lost its caller, is
killed. Standard input has a ServedModelSpec. For each worker to fork, the socket FD receives one end of the worker's
socket. The ServedModelSpec, a job's function and its result are pickled, because no struct can declare them. Both ends
run the same code, because they belong to one start of the server.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from quire.engine.common.errors import QuireError
from quire.engine.images.image_decoding import preload_decoders
from quire.engine.processes.frames import encode_frame, frame_pieces, read_frame
from quire.server.config import ServerConfig
from quire.server.resolve import invocations  # noqa: F401 - jobs need it, so load it before forking
from quire.server.served_model import ServedModel, ServedModelSpec

JobFunction = Callable[[bytes, ServedModel, ServerConfig], Any]

NICENESS = 5
"""Workers yield to the server and its engine, because running streams come before new requests."""
_MAX_GROWTH_BYTES = 48 << 20
"""A worker whose private memory has grown by more than this exits after it has sent the job's result."""


class WorkerStarted(msgspec.Struct, frozen=True):
    pid: int


class JobLimits(msgspec.Struct, frozen=True):
    cpu_seconds: float
    memory_bytes: int


class WorkerJob(msgspec.Struct, frozen=True):
    """Two frames follow: a pickled JobFunction, and the body."""

    limits: JobLimits
    adapters: Sequence[str]


class JobResult(msgspec.Struct, frozen=True):
    """The pickled result or error follows in a frame."""

    succeeded: bool | None
    """True: the result follows. False: a QuireError follows. None: a traceback's text follows."""
    is_reusable: bool


decode_worker_started = msgspec.msgpack.Decoder(WorkerStarted).decode
decode_job = msgspec.msgpack.Decoder(WorkerJob).decode
decode_job_result = msgspec.msgpack.Decoder(JobResult).decode


def run_fork_server(configuration: BinaryIO, control: socket.socket) -> None:
    os.nice(NICENESS)
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # a terminal sends them to the whole process group
        signal.signal(ignored, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)
    try:
        source = pickle.loads(_read_frame(configuration))
    except EOFError:  # the server was killed while it started this process
        return
    assert isinstance(source, ServedModelSpec)
    adapters: list[str] = []
    model = source.build_served_model(expendable=True, adapters=adapters)
    if model.multimodal_prompt_builder is not None:
        preload_decoders()
    gc.collect()
    gc.freeze()
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        _reap_ended_workers()
        if os.fork() == 0:
            control.close()
            run_worker(socket.socket(fileno=descriptors[0]), model, adapters, source.config)
            os._exit(0)
        os.close(descriptors[0])


def _reap_ended_workers() -> None:
    """Reaps only before a fork, because reaping removes the entry in /proc from which the server reads how a worker
    ended.
    """
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def run_worker(connection: socket.socket, model: ServedModel, adapters: list[str], config: ServerConfig) -> None:
    """`adapters` is the list to which `model` refers; each job updates it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # native libraries report a lack of memory there
    frames = connection.makefile("rb")
    initial_bytes = private_memory_bytes()
    try:
        connection.sendall(encode_frame(WorkerStarted(os.getpid())))
        while True:
            job = decode_job(_read_frame(frames))
            work = pickle.loads(_read_frame(frames))
            body = _read_frame(frames)
            adapters[:] = job.adapters
            succeeded, value = _run_job(work, job.limits, body, model, config, initial_bytes)
            result = JobResult(succeeded, private_memory_bytes() - initial_bytes <= _MAX_GROWTH_BYTES)
            for piece in (encode_frame(result), *frame_pieces([pickle.dumps(value, pickle.HIGHEST_PROTOCOL)])):
                connection.sendall(piece)
            if not result.is_reusable:
                return
            del work, body, value
    except (EOFError, ConnectionError):
        return


def _read_frame(pipe: BinaryIO) -> bytes:
    if (content := read_frame(pipe)) is None:
        raise EOFError
    return content


def _run_job(
    work: JobFunction, limits: JobLimits, body: bytes, model: ServedModel, config: ServerConfig, initial_bytes: int
) -> tuple[bool | None, Any]:
    resource.setrlimit(
        resource.RLIMIT_DATA, (initial_bytes + limits.memory_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1])
    )
    # The timer's signal, SIGPROF, ends the process, even inside native code.
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
    try:
        return True, work(body, model, config)
    except QuireError as error:
        return False, error
    except MemoryError:
        os._exit(1)
    except Exception:
        return None, traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def private_memory_bytes() -> int:
    """Returns the writable memory of this process only, which RLIMIT_DATA limits."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmData:")[2].split()[0]) * 1024


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads do not survive a fork
    run_fork_server(sys.stdin.buffer, socket.socket(fileno=int(sys.argv[1])))
