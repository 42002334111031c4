"""The processes of the ranks but the first, which starts them, tells them what to do, and ends with each of them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from quire.engine.config import EngineConfig
from quire.engine.core.executor import AdapterLoader, Everywhere
from quire.engine.errors import ConfigError, EngineError
from quire.engine.lora.files import CONFIG, WEIGHTS
from quire.engine.models.decoder import Decoder
from quire.engine.processes.child import Child, module
from quire.engine.processes.exit_cause import exit_cause
from quire.engine.processes.procfs import Stopped
from quire.engine.replicas.cores import allowed_cores, node_cores, stay_on
from quire.engine.types import Adapter
from quire.engine.worker.heads import Heads
from quire.engine.worker.loading.model import LoadedModel
from quire.engine.worker.ranks.adapters import LeadingAdapters
from quire.engine.worker.ranks.calls import RankWorker, called
from quire.engine.worker.ranks.messages import (
    Call,
    Called,
    Failed,
    LoadAdapter,
    Loaded,
    Measured,
    Start,
    ToRank,
    decode_from_rank,
    frame,
    read_frame,
)
from quire.engine.worker.ranks.remote import Remote
from quire.engine.worker.runner import Runner
from quire.kernels.collective import RankEnded

_STOP_SECONDS = 5.0
"""How long a process gets to end by itself once its pipe is closed."""
_LOOK_SECONDS = 0.5
PROGRAM = module("quire.engine.worker.ranks.follower")

Answer = TypeVar("Answer", Loaded, Measured, Called)


class RankProcess(Protocol):
    """What Child is, and a rank on another machine too."""

    pid: int

    def send(self, content: bytes, /) -> None: ...
    def end(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def destroy(self) -> None: ...


class Ranks(ABC):
    """Started when constructed; ended by `close`, or when nobody holds this any more. Raises ConfigError where they
    cannot be started."""

    setting: str
    """That asks for them."""
    called: str
    """What they are called."""
    pinned = True
    """Whether each stays on cores of its own, where there are several nodes of memory."""

    def __init__(
        self,
        config: EngineConfig,
        descriptors: Sequence[list[int]],
        on_end: Callable[[int], None] | None = None,
        remote: Sequence[Remote] = (),
        store: tuple[str, int] | None = None,
    ) -> None:
        """`descriptors`: for each process of this machine, by which it reaches others; they are closed here. `on_end`
        is called, by a thread, with the return code of a process that ends unasked, as subprocess says it; then every
        later call raises EngineError. `remote`: those of other machines. `store`: see Start."""
        local = 1 + len(descriptors)
        self.count = local + len(remote)
        self._on_end = on_end
        self._closing = threading.Event()
        self._ended = threading.Event()
        self.failure = ""
        """Which of them has ended, and how."""
        self._processes: list[RankProcess] = []
        self._answers: list[Callable[[], bytes | None]] = []
        """What reads each one's next frame; None: it has ended."""
        self._sent: set[str] = set()
        """Digests of the adapters that other machines have."""
        allowed = allowed_cores()
        self._cores = node_cores(local, allowed) if self.pinned else []
        self.close = weakref.finalize(self, _end, self._processes, self._closing, allowed if self._cores else set())
        """Ends the processes and waits for them."""
        try:
            told = config.model_dump_json()
            for rank, own in enumerate(descriptors, 1):
                cores = sorted(self._cores[rank]) if self._cores else []
                self._start(Start(told, rank, own, cores, store))
            for rank, each in enumerate(remote, local):
                self._begin(each, each.get, Start(told, rank, [], [], store))
            stay_on(self._cores[0] if self._cores else set())
            looks_at = (self._processes, self._closing, config.engine_heartbeat_timeout)
            threading.Thread(target=_kill_stopped, args=looks_at, name="rank-stopped", daemon=True).start()
        except OSError as error:
            self.close()
            why = f"no process can be started: {error.strerror}"
            raise ConfigError(f"{self.setting}: {why}", param=self.setting) from error
        finally:
            for descriptor in {each for own in descriptors for each in own}:
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
        """Raises EngineError, which says why, where what runs inside finds that a rank has ended."""
        if self._ended.is_set():
            raise EngineError(self.failure)
        try:
            yield
        except (RankEnded, ConnectionError, TimeoutError) as error:
            self._ended.wait(_STOP_SECONDS)  # a pipe breaks a moment before its process has ended
            raise EngineError(self.failure or "a rank has closed its pipe") from error

    def wait_loaded(self) -> list[Loaded]:
        """Wait until all have loaded their weights. Returns what each says of them. Raises what they raised."""
        return self.read(Loaded)

    def read(self, kind: type[Answer]) -> list[Answer]:
        """The next answer of each, which is of this kind. Raises what they raised."""
        found = []
        for read in self._answers:
            if (content := read()) is None:
                with self.watched():
                    raise RankEnded
            answer = decode_from_rank(content)
            if isinstance(answer, Failed):
                raise ConfigError(answer.message, param=answer.param)
            assert isinstance(answer, kind)
            found.append(answer)
        return found

    @abstractmethod
    def load(self, load: Callable[..., LoadedModel]) -> tuple[LoadedModel, int]:
        """This process' part of the model, which `load` loads, once all have theirs; and the bytes of what other stages
        hold. Of ranks that divide every layer it counts what all have read."""

    def available(self, measure: Callable[[], int]) -> int:
        """Bytes for the KV cache, here and where others compute; `measure` finds this process'."""
        return measure()

    @abstractmethod
    def runner(self, *parts: Any) -> Runner:
        """This process', which leads the others'. `parts`: a Runner's."""

    def heads(self, *parts: Any) -> Heads:
        """`parts`: those of Heads."""
        return Heads(*parts)

    def adapters(self, own: AdapterLoader) -> AdapterLoader:
        """What loads adapters on all of them; `own`: on this one."""
        return LeadingAdapters(own, self)

    def everywhere(self, model: Decoder) -> Everywhere | None:
        """What calls something on all of them; None: they take no calls. `model`: this one's part."""
        worker = RankWorker(0, self.count, model)

        def call(content: bytes) -> list[bytes]:
            self.send(Call(content))
            with self.watched():
                own = called(worker, content)
            return [own, *(each.content for each in self.read(Called))]

        return call

    def environment(self, rank: int) -> dict[str, str] | None:
        """The variables of a process; None: this one's."""
        return None

    @property
    def note(self) -> str:
        where = f", on cores {'; '.join(str(sorted(each)) for each in self._cores)}" if self._cores else ""
        return f"{self.count} {self.called}, beside this process {', '.join(map(_name, self._processes))}{where}"

    @property
    def pids(self) -> Sequence[int]:
        return [process.pid for process in self._processes]

    def _start(self, start: Start) -> None:
        answers, theirs = os.pipe()
        try:
            child = Child(
                [*PROGRAM, str(theirs)],
                descriptors=(*start.descriptors, theirs),
                environment=self.environment(start.rank),
            )
        except OSError:
            os.close(answers)
            raise
        finally:
            os.close(theirs)
        self._begin(child, partial(read_frame, os.fdopen(answers, "rb")), start)

    def _begin(self, process: RankProcess, read: Callable[[], bytes | None], start: Start) -> None:
        self._processes.append(process)
        self._answers.append(read)
        watch = (process, start.rank, weakref.ref(self), self._closing)
        threading.Thread(target=_watch, args=watch, name=f"rank-{start.rank}-watch", daemon=True).start()
        with suppress(ConnectionError):  # it has ended already, which `wait_loaded` will report
            process.send(frame(start))

    def lost(self, rank: int, process: RankProcess, code: int) -> None:
        """A process has ended unasked. Called by a thread."""
        how = exit_cause(code, sender=None, oom_kills=0).description
        if isinstance(process, Remote) and process.lost:
            how = "is out of reach"
        self.failure = self.failure or f"rank {rank} of {self.count} (process {_name(process)}) {how}"
        self.let_go()
        if self._on_end is not None:
            print(f"quire: {self.failure}", file=sys.stderr, flush=True)
            self._on_end(code)  # which may end this process, before anybody gets an error for it
        self._ended.set()

    def let_go(self) -> None:  # noqa: B027
        """Let none wait for one that has ended. Called by a thread."""


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


def _end(processes: Sequence[RankProcess], closing: threading.Event, cores: Set[int]) -> None:
    """`cores`: those that this thread had before it was bound to fewer, if it was."""
    closing.set()
    stay_on(cores)
    for process in processes:
        process.end()
    for process in processes:
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.destroy()
