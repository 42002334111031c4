"""A process that we start: how it gets its configuration, how it is waited for, and how it ends, with us at the latest.

`read_configuration`, `end_with_parent` and `die_with_parent` are for the process itself.
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
"""From Linux's sys/prctl.h: send this process a signal when its parent ends."""


def module(name: str) -> tuple[str, ...]:
    """Arguments with which Python runs a module of ours. `-m` would search the current directory first, and a random.py
    there would replace Python's: -P prevents it."""
    return ("-P", "-m", name)


class Child:
    """Python with these arguments. Standard input begins with the configuration, one line, where there is one, and
    stays open as long as we live. Raises OSError when no process can be started."""

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
        # In a session of its own it does not get the terminal's Ctrl-C: we do, and decide what is to happen.
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
        """Give it the configuration that it did not get at its start."""
        with suppress(BrokenPipeError):  # it has ended already, which `wait_for_exit` will tell
            self.send(configuration + b"\n")

    def send(self, content: bytes) -> None:
        """Write to its standard input. Raises BrokenPipeError where it has ended."""
        self._lifeline.write(content)
        self._lifeline.flush()

    @property
    def returncode(self) -> int | None:
        return self.process.poll()

    def end(self) -> None:
        """Let it end itself."""
        with suppress(BrokenPipeError):  # it has ended before it read its configuration
            self._lifeline.close()

    def kill(self) -> None:
        self.process.kill()

    def wait(self) -> int:
        """As `wait_for_exit`, where there is no event loop."""
        return self.process.wait()

    async def wait_for_exit(self, seconds: float = math.inf) -> int:
        """Wait until it has ended; kill it after so many seconds. Returns its return code."""
        for _ in _kill_after([self], seconds):
            await asyncio.sleep(_POLL_SECONDS)
        self.end()
        code = self.returncode
        assert code is not None
        return code

    async def stop(self, seconds: float) -> None:
        """As `end_processes`, in an event loop."""
        self.end()
        await self.wait_for_exit(seconds)


class RunningProcess(Protocol):
    """A Child, or what stands for a process on another machine."""

    @property
    def returncode(self) -> int | None: ...
    def end(self) -> None: ...
    def kill(self) -> None: ...


def end_processes(
    processes: Sequence[RunningProcess], seconds: float, sleep: Callable[[float], object] = time.sleep
) -> None:
    """Let them end themselves, and wait for all of them together; kill those that take longer."""
    for process in processes:
        process.end()
    for _ in _kill_after(processes, seconds):
        sleep(_POLL_SECONDS)


def _kill_after(processes: Sequence[RunningProcess], seconds: float) -> Iterator[None]:
    """Yields until all have ended."""
    deadline = clock.monotonic() + seconds
    while running := [process for process in processes if process.returncode is None]:
        if clock.monotonic() >= deadline:
            deadline = math.inf
            for process in running:
                process.kill()
        yield


def _directory() -> str | None:
    """None for ours; if that was deleted another one, because PyTorch's libraries do not load without one."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "/"
    return None


def read_configuration() -> bytes:
    """Read one line of standard input and not a byte more: `end_with_parent` reads what follows."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def end_with_parent() -> None:
    """End this process when its parent ends.

    The parent holds the other end of our standard input, which closes with it.
    """

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
    die_with_parent()


def die_with_parent() -> None:
    """On Linux the kernel kills this process when its parent ends, even where no thread of it can read its standard
    input, because a step hangs or because it is stopped. It does not where the parent ended before: then this process
    ends here, for nobody holds the other end of its standard input."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = select.poll()
        parent.register(0, 0)  # that the other end is closed is told always, also behind what it wrote
        if any(event & select.POLLHUP for _, event in parent.poll(0)):
            os._exit(0)
