"""A child process that does not outlive its parent. `read_configuration`, `end_with_parent` and `die_with_parent` run
in the child.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from quire.engine.common import clock

_POLL_SECONDS = 0.02
_PR_SET_PDEATHSIG = 1


def module(name: str) -> tuple[str, ...]:
    """Without -P, a random.py in the current directory would replace Python's."""
    return ("-P", "-m", name)


class Child:
    """Standard input begins with a line of configuration, and stays open while the parent lives. The constructor raises
    OSError if no process can be started.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        configuration: bytes | None = None,
        *,
        descriptors: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        # A session of its own keeps the terminal's Ctrl-C from the child, so that the parent decides what happens.
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            pass_fds=descriptors,
            start_new_session=True,
            env=environment,
            cwd=_directory(),
        )
        self.pid = self.process.pid
        assert self.process.stdin is not None
        self._lifeline = self.process.stdin
        if configuration is not None:
            self.tell(configuration)

    def tell(self, configuration: bytes) -> None:
        with suppress(BrokenPipeError):  # `wait_for_exit` reports the exit
            self.send(configuration + b"\n")

    def send(self, content: bytes) -> None:
        """Raises BrokenPipeError if the process has ended."""
        self._lifeline.write(content)
        self._lifeline.flush()

    @property
    def returncode(self) -> int | None:
        return self.process.poll()

    def end(self) -> None:
        with suppress(BrokenPipeError):
            self._lifeline.close()

    def kill(self) -> None:
        self.process.kill()

    def wait(self) -> int:
        return self.process.wait()

    async def wait_for_exit(self, seconds: float = math.inf) -> int:
        """Kills the process after `seconds`."""
        for _ in _kill_after([self], seconds):
            await asyncio.sleep(_POLL_SECONDS)
        self.end()
        code = self.returncode
        assert code is not None
        return code

    async def stop(self, seconds: float) -> None:
        self.end()
        await self.wait_for_exit(seconds)


class RunningProcess(Protocol):
    """A Child, or an object that represents a process on another machine."""

    @property
    def returncode(self) -> int | None: ...
    def end(self) -> None: ...
    def kill(self) -> None: ...


def end_processes(
    processes: Sequence[RunningProcess], seconds: float, sleep: Callable[[float], object] = time.sleep
) -> None:
    """First asks all processes to end, then kills those that remain after `seconds`."""
    for process in processes:
        process.end()
    for _ in _kill_after(processes, seconds):
        sleep(_POLL_SECONDS)


def _kill_after(processes: Sequence[RunningProcess], seconds: float) -> Iterator[None]:
    deadline = clock.monotonic() + seconds
    while running := [process for process in processes if process.returncode is None]:
        if clock.monotonic() >= deadline:
            deadline = math.inf
            for process in running:
                process.kill()
        yield


def _directory() -> str | None:
    """Returns / if the current directory was deleted, because PyTorch's libraries need one to load; otherwise None."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "/"
    return None


def read_configuration() -> bytes:
    """Reads one line of standard input and no byte more, because `end_with_parent` reads what follows."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def end_with_parent() -> None:

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
    die_with_parent()


def die_with_parent() -> None:
    """Lets the kernel (on Linux) kill this process when its parent ends, because a hanging process does not read
    standard input. Exits if the parent has already ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = select.poll()
        parent.register(0, 0)  # POLLHUP is always reported, even after unread data
        if any(event & select.POLLHUP for _, event in parent.poll(0)):
            os._exit(0)
