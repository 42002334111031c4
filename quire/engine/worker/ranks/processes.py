"""The processes of the ranks but the first, which starts them, tells them what to do, and ends with each of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from quire.engine.config import EngineConfig
from quire.engine.core.executor import AdapterLoader, CollectiveRPC
from quire.engine.errors import ConfigError, EngineError
from quire.engine.lora.files import CONFIG, WEIGHTS
from quire.engine.models.decoder import Decoder
from quire.engine.processes.child import Child, module
from quire.engine.processes.exit_cause import exit_cause
from quire.engine.processes.procfs import Stopped
from quire.engine.replicas.cores import allowed_cores, node_cores, stay_on
from quire.engine.types import Adapter
from quire.engine.worker.device import Chosen
from quire.engine.worker.ranks.calls import RankWorker, called
from quire.engine.worker.ranks.meeting import check_connection, in_order, open_store
from quire.engine.worker.ranks.messages import (
    Allocate,
    Allocated,
    Call,
    Called,
    Failed,
    Inbox,
    Kinds,
    LoadAdapter,
    Loaded,
    Measure,
    Measured,
    Start,
    ToRank,
    UseAdapter,
    decode_from_rank,
    frame,
    read_frame,
)
from quire.engine.worker.ranks.remote import Gathering, Remote
from quire.engine.worker.ranks.single_process import SingleProcess
from quire.kernels.collective import Collective, RankEnded
from quire.kernels.distributed import join_ranks

STOP_SECONDS = 5.0
"""How long a process gets to end by itself once its pipe is closed."""
_LOOK_SECONDS = 0.5
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_CUMEM = "NCCL_CUMEM_ENABLE"
"""With 1, NCCL pays for what decode graphs hold of its calls with memory of its own, gigabytes with some drivers
(https://github.com/NVIDIA/nccl/issues/1234), which nobody has set aside. Without, there are no sums by NVLink's
switches (NVLS); so it stays as it is where no graph is captured."""
PROGRAM = module("quire.engine.worker.ranks.follower")

Answer = TypeVar("Answer", Loaded, Measured, Allocated, Kinds, Called)


class RankProcess(Protocol):
    """What Child is, and a rank on another machine too."""

    pid: int

    def send(self, content: bytes, /) -> None: ...
    def end(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def destroy(self) -> None: ...


class LeadingAdapters:
    """The first rank's AdapterLoader."""

    def __init__(self, own: AdapterLoader, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks
        self.wait = own.wait

    def load(self, slot: int, adapter: Adapter) -> None:
        self._ranks.send_adapter(slot, adapter)
        self._own.load(slot, adapter)

    def loaded(self) -> list[tuple[int, str | None]]:
        found = self._own.loaded()
        for slot, failure in found:
            self._ranks.send(UseAdapter(slot, failed=failure is not None))
        return found


class Ranks(SingleProcess):
    """Started when constructed, once all machines have joined; ended by `close`, or when nobody holds this any more.
    Raises ConfigError where they cannot be started."""

    setting: str
    """That asks for them."""
    called: str
    """What they are called."""
    over_memory = True
    """Whether they may reach each other over memory that they share."""
    stop_seconds = STOP_SECONDS
    """How long the end of a process whose pipe broke is waited for."""

    def __init__(self, config: EngineConfig, chosen: Chosen, on_end: Callable[[int], None] | None = None) -> None:
        """`config`: with this machine's own paths. `on_end` is called, by a thread, with the return code of a process
        that ends unasked, as subprocess says it; then every later call raises EngineError."""
        self._config, self._device, self._on_end = config, chosen.device, on_end
        self.count = config.ranks
        self._over, self._closing, self._ended = (threading.Event() for _ in range(3))
        self.failure = ""
        """Which of them has ended, and how."""
        self._processes: list[RankProcess] = []
        self._answers: list[Callable[[float | None], bytes | None]] = []
        """What reads each one's next frame; None: it has ended."""
        self._sent: set[str] = set()
        """Digests of the adapters that other machines have."""
        if chosen.device.type == "cuda" and not config.enforce_eager:
            os.environ.setdefault(_CUMEM, "0")
        gathering = Gathering(config) if config.nnodes > 1 else None
        remote = [] if gathering is None else gathering.wait()
        try:
            self.group, memory, store = self._meet(chosen, gathering)
            self._start_all(memory, remote, store)
        except BaseException:
            for each in remote:
                each.destroy()
            raise

    def _meet(
        self, chosen: Chosen, gathering: Gathering | None
    ) -> tuple[Collective, list[int], tuple[str, int] | None]:
        """The ranks as this one sees them, and by which descriptors or at which place the others find them."""
        row = 4 * -(-chosen.spec.vocab_size // self.count)
        over_memory = self.over_memory and gathering is None
        memory = chosen.backend.ranks_memory(self.count, row) if over_memory else None
        if memory is not None:
            return chosen.backend.collective(memory, 0, self.count), [memory], None
        host = "127.0.0.1" if gathering is None else gathering.host
        store = open_store(socket.create_server((host, 0))) if gathering is None else gathering.store
        ordered = in_order(self._config, chosen.device)
        how = {"in_order": ordered, "one_shot": self._config.one_shot_sums}
        group = join_ranks(store, 0, self.count, chosen.device, **how, address=host)
        return group, [], (host, store.port)

    def _start_all(self, memory: list[int], remote: Sequence[Remote], store: tuple[str, int] | None) -> None:
        on_cpu, here, told = self._device.type == "cpu", self._config.ranks_here, self._config.model_dump_json()
        # NCCL waits in `close` until the GPU has stopped, and until no decode graph holds its calls any more. The
        # thread is there from the start: this may be let go of when a program ends, which begins no threads then.
        closing = threading.Thread(target=_close, args=(self._over, self.group), name="let-go", daemon=True)
        closing.start()
        waits = closing if on_cpu else None  # for the store's port, which the next engine listens at
        weakref.finalize(self, _let_go, self._over, waits).atexit = False
        allowed = allowed_cores()
        cores = node_cores(here, allowed) if on_cpu else []
        self._end = weakref.finalize(self, end_all, self._processes, self._closing, allowed if cores else set())
        try:
            for rank in range(1, here):
                self._start(Start(told, rank, memory, sorted(cores[rank]) if cores else [], store))
            for rank, each in enumerate(remote, here):
                self._begin(each, each.get, Start(told, rank, [], [], store))
            stay_on(cores[0] if cores else set())
            where = f", on cores {'; '.join(str(sorted(each)) for each in cores)}" if cores else ""
            where += "" if on_cpu else ", each on a GPU of its own"
            names = ", ".join(map(_name, self._processes))
            self.note = f"{self.count} {self.called}, beside this process {names}{where}"
            looks_at = (self._processes, self._closing, self._config.engine_heartbeat_timeout)
            threading.Thread(target=_kill_stopped, args=looks_at, name="rank-stopped", daemon=True).start()
        except OSError as error:
            self.close()
            why = f"no process can be started: {error.strerror}"
            raise ConfigError(f"{self.setting}: {why}", param=self.setting) from error
        finally:
            for descriptor in memory:
                os.close(descriptor)

    def send(self, message: ToRank) -> None:
        """To all of them. They read it when they have done what they were told before."""
        self._send(message, self._processes)

    def send_adapter(self, slot: int, adapter: Adapter) -> None:
        """Tell them to load it; ranks of other machines get its files, once."""
        here = [each for each in self._processes if not isinstance(each, Remote)]
        there = [each for each in self._processes if isinstance(each, Remote)]
        self._send(LoadAdapter(slot, adapter), here)
        if there:
            names = () if adapter.digest in self._sent else (CONFIG, WEIGHTS)
            files = {}
            with suppress(OSError):  # then they cannot load it, nor can this rank, which says why
                files = {name: (Path(adapter.folder) / name).read_bytes() for name in names}
                self._sent.add(adapter.digest)
            self._send(LoadAdapter(slot, adapter, files), there)

    def _send(self, message: ToRank, processes: Sequence[RankProcess]) -> None:
        content = frame(message)
        with self.watched():
            for process in processes:
                process.send(content)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raises EngineError, which says why, where what runs inside finds that a rank has ended, and where a GPU that
        waits no longer for one goes on with what it has."""
        self._check()
        try:
            yield
        except (RankEnded, ConnectionError, TimeoutError) as error:
            self._ended.wait(self.stop_seconds)  # a pipe breaks a moment before its process has ended
            raise EngineError(self.failure or "a rank has closed its pipe") from error
        except RuntimeError as error:  # PyTorch's
            self._check(error)
            raise
        self._check()

    def _check(self, error: Exception | None = None) -> None:
        if self.failure:
            raise EngineError(self.failure) from error

    @contextmanager
    def told(self, message: ToRank) -> Iterator[None]:
        """All other ranks do what runs inside."""
        self.send(message)
        with self.watched():
            yield

    def read(self, kind: type[Answer], seconds: float | None = None) -> list[Answer]:
        """The next answer of each, which is of this kind. Raises what they raised, and EngineError where one does not
        answer for so many seconds (None: it takes as long as it does)."""
        found = []
        for rank, read in enumerate(self._answers, 1):
            try:
                content = read(seconds)
            except TimeoutError as error:
                raise EngineError(f"rank {rank} of {self.count} has not answered for {seconds:g} s") from error
            if content is None:
                with self.watched():
                    raise RankEnded
            answer = decode_from_rank(content)
            if isinstance(answer, Failed):
                raise ConfigError(f"{answer.message} (rank {rank} of {self.count})", param=answer.param)
            assert isinstance(answer, kind)
            found.append(answer)
        return found

    def available(self, measure: Callable[[], int]) -> int:
        """What the ranks of a machine have together, as the machine, or the GPU, with the least room decides; once all
        have reached each other. Raises ConfigError."""
        with self.told(Measure()):
            check_connection(self.group, self._device, self.setting)
            own = measure()
        least = min([own, *(each.available for each in self.read(Measured))])
        return least * self.count if self._device.type == "cuda" else least

    def allocate(self, message: Allocate) -> None:
        self.send(message)
        self.read(Allocated)

    def close(self) -> None:
        """End the processes and wait for them."""
        self._end()

    def adapters(self, own: AdapterLoader) -> AdapterLoader:
        return LeadingAdapters(own, self)

    def everywhere(self, model: Decoder) -> CollectiveRPC | None:
        worker = RankWorker(0, self.count, model)

        def call(content: bytes) -> list[bytes]:
            with self.told(Call(content)):
                own = called(worker, content)
            return [own, *(each.content for each in self.read(Called))]

        return call

    def _environment(self, rank: int) -> dict[str, str] | None:
        """The variables of a process; None: this one's."""
        if self._device.type != "cuda":
            return None
        return os.environ | {_VISIBLE: visible_gpus(rank, os.environ.get(_VISIBLE), torch.cuda.device_count())}

    @property
    def pids(self) -> Sequence[int]:
        return [process.pid for process in self._processes]

    def _start(self, start: Start) -> None:
        answers, theirs = os.pipe()
        try:
            child = Child(
                [*PROGRAM, str(theirs)],
                descriptors=(*start.descriptors, theirs),
                environment=self._environment(start.rank),
            )
        except OSError:
            os.close(answers)
            raise
        finally:
            os.close(theirs)
        self._begin(child, Inbox(partial(read_frame, os.fdopen(answers, "rb"))).get, start)

    def _begin(self, process: RankProcess, read: Callable[[float | None], bytes | None], start: Start) -> None:
        self._processes.append(process)
        self._answers.append(read)
        watch = (process, start.rank, weakref.ref(self), self._closing)
        threading.Thread(target=_watch, args=watch, name=f"rank-{start.rank}-watch", daemon=True).start()
        with suppress(ConnectionError):  # it has ended already, which `read` will report
            process.send(frame(start))

    def lost(self, rank: int, process: RankProcess, code: int) -> None:
        """A process has ended unasked. Called by a thread."""
        how = exit_cause(code, sender=None, oom_kills=0).description
        if isinstance(process, Remote) and process.lost:
            how = "is out of reach"
        self.failure = self.failure or f"rank {rank} of {self.count} (process {_name(process)}) {how}"
        self._over.set()  # so that none waits for one that has ended
        if self._on_end is not None:
            print(f"quire: {self.failure}", file=sys.stderr, flush=True)
            self._on_end(code)  # which may end this process, before anybody gets an error for it
        self._ended.set()


def _name(process: RankProcess) -> str:
    return f"{process.pid} on {process.host}" if isinstance(process, Remote) else str(process.pid)


def _watch(process: RankProcess, rank: int, ranks: weakref.ref[Ranks], closing: threading.Event) -> None:
    code = process.wait()
    if not closing.is_set() and (owner := ranks()) is not None:
        owner.lost(rank, process, code)


def _kill_stopped(processes: Sequence[RankProcess], closing: threading.Event, patience: float) -> None:
    """In a thread: kill those that stand stopped for so many seconds. All others would wait for one, as long as a step
    may take; a machine's member (engine/member.py) does the same for its own."""
    stopped, last = Stopped(), time.monotonic()
    while not closing.wait(_LOOK_SECONDS):
        last, elapsed = time.monotonic(), min(time.monotonic() - last, 2 * _LOOK_SECONDS)
        for process in processes:
            if not isinstance(process, Remote) and stopped.advance(process.pid, elapsed) > patience:
                said = f"quire: process {process.pid}, a rank, was stopped for {patience:g} s: it is killed"
                print(said, file=sys.stderr, flush=True)
                process.destroy()


def end_all(
    processes: Sequence[RankProcess],
    closing: threading.Event,
    cores: Set[int],
    monotonic: Callable[[], float] = time.monotonic,
) -> None:
    """`cores`: those that this thread had before it was bound to fewer, if it was."""
    closing.set()
    stay_on(cores)
    for process in processes:
        process.end()
    until = monotonic() + STOP_SECONDS  # of all together: those that wait in NCCL for each other never end
    for process in processes:
        try:
            process.wait(max(until - monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.destroy()


def _let_go(over: threading.Event, closing: threading.Thread | None) -> None:
    over.set()
    if closing is not None:
        closing.join(STOP_SECONDS)


def _close(over: threading.Event, group: Collective) -> None:
    """In a thread."""
    over.wait()
    group.close()


def visible_gpus(rank: int, visible: str | None, count: int) -> str:
    """CUDA_VISIBLE_DEVICES of a rank, by the engine's and the number of GPUs: its own first, so that in each rank every
    thread's GPU is the right one. It sees the others too, for where one rank sees a GPU and another does not, NCCL may
    choose different ways between them (https://github.com/NVIDIA/nccl/issues/1066)."""
    gpus = [str(gpu) for gpu in range(count)] if visible is None else [each.strip() for each in visible.split(",")]
    return ",".join([gpus.pop(rank), *gpus])
