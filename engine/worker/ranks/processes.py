"""The processes of the ranks but the first, which starts them, tells them what to do, and ends with each of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from typing import BinaryIO

from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError, EngineError
from quire.engine.replicas.cores import allowed_cores, node_cores, stay_on
from quire.engine.worker.ranks.messages import (
    Failed,
    Loaded,
    Start,
    ToRank,
    decode_from_rank,
    frame,
    read_frame,
)
from quire.kernels.collective import RankEnded

_STOP_SECONDS = 5.0
"""How long a process gets to end by itself once its pipe is closed."""
_MODULE = "quire.engine.worker.ranks.follower"


class Ranks:
    """Started when constructed; ended by `close`, or when nobody holds this any more. Raises ConfigError where they
    cannot be started."""

    setting: str
    """That asks for them."""
    called: str
    """What they are called."""

    def __init__(
        self, config: EngineConfig, descriptors: Sequence[list[int]], on_end: Callable[[int], None] | None = None
    ) -> None:
        """`descriptors`: for each process, by which it reaches others; they are closed here. `on_end` is called, by a
        thread, with the return code of a process that ends unasked, as subprocess says it; then every later call raises
        EngineError."""
        self.count = 1 + len(descriptors)
        self._on_end = on_end
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._failure = ""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._answers: list[BinaryIO] = []
        allowed = allowed_cores()
        self._cores = node_cores(self.count, allowed)
        self.close = weakref.finalize(self, _end, self._processes, self._closing, allowed if self._cores else set())
        """Ends the processes and waits for them."""
        try:
            for rank, own in enumerate(descriptors, 1):
                self._start(config, rank, own)
            stay_on(self._cores[0] if self._cores else set())
        except OSError as error:
            self.close()
            why = f"no process can be started: {error.strerror}"
            raise ConfigError(f"{self.setting}: {why}", param=self.setting) from error
        finally:
            for descriptor in {each for own in descriptors for each in own}:
                os.close(descriptor)

    def send(self, message: ToRank) -> None:
        """To all of them. They read it when they have done what they were told before."""
        content = frame(message)
        with self.watched():
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(content)
                process.stdin.flush()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raises EngineError, which says why, where what runs inside finds that a rank has ended."""
        if self._ended.is_set():
            raise EngineError(self._failure)
        try:
            yield
        except (RankEnded, BrokenPipeError) as error:
            self._ended.wait(_STOP_SECONDS)  # a pipe breaks a moment before its process has ended
            raise EngineError(self._failure or "a rank has closed its pipe") from error

    def wait_loaded(self) -> list[Loaded]:
        """Wait until all have loaded their weights. Returns what each says of them. Raises what they raised."""
        found = []
        for answers in self._answers:
            if (content := read_frame(answers)) is None:
                with self.watched():
                    raise RankEnded
            answer = decode_from_rank(content)
            if isinstance(answer, Failed):
                raise ConfigError(answer.message, param=answer.param)
            assert isinstance(answer, Loaded)
            found.append(answer)
        return found

    @property
    def note(self) -> str:
        where = f", on cores {'; '.join(str(sorted(each)) for each in self._cores)}" if self._cores else ""
        return f"{self.count} {self.called}, beside this process {', '.join(map(str, self.pids))}{where}"

    @property
    def pids(self) -> Sequence[int]:
        return [process.pid for process in self._processes]

    def _start(self, config: EngineConfig, rank: int, descriptors: list[int]) -> None:
        answers, theirs = os.pipe()
        try:
            # -P: see EngineProcess
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, str(theirs)],
                stdin=subprocess.PIPE,
                pass_fds=(*descriptors, theirs),
            )
        except OSError:
            os.close(answers)
            raise
        finally:
            os.close(theirs)
        self._processes.append(process)
        self._answers.append(os.fdopen(answers, "rb"))
        watch = (process, rank, weakref.ref(self), self._closing)
        threading.Thread(target=_watch, args=watch, name=f"rank-{rank}-watch", daemon=True).start()
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, which `wait_loaded` will report
            cores = sorted(self._cores[rank]) if self._cores else []
            process.stdin.write(frame(Start(config.model_dump_json(), rank, descriptors, cores)))
            process.stdin.flush()

    def lost(self, rank: int, pid: int, code: int) -> None:
        """A process has ended unasked. Called by a thread."""
        how = f"exited with code {code}" if code >= 0 else f"was killed by {_signal_name(-code)}"
        self._failure = self._failure or f"rank {rank} of {self.count} (process {pid}) {how}"
        self._let_go()
        if self._on_end is not None:
            print(f"quire: {self._failure}", file=sys.stderr, flush=True)
            self._on_end(code)  # which may end this process, before anybody gets an error for it
        self._ended.set()

    def _let_go(self) -> None:
        """Let none wait for one that has ended. Called by a thread."""


def _watch(process: subprocess.Popen[bytes], rank: int, ranks: weakref.ref[Ranks], closing: threading.Event) -> None:
    code = process.wait()
    if not closing.is_set() and (owner := ranks()) is not None:
        owner.lost(rank, process.pid, code)


def _end(processes: Sequence[subprocess.Popen[bytes]], closing: threading.Event, cores: Set[int]) -> None:
    """`cores`: those that this thread had before it was bound to fewer, if it was."""
    closing.set()
    stay_on(cores)
    for process in processes:
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
    for process in processes:
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
