from __future__ import annotations

import faulthandler
import io
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from quire.engine.common.errors import ConfigError

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

log = logging.getLogger("quire.server")

INTERRUPTED_STATUS = 130
MIN_OPEN_FILES = 64
"""The server and the engine cannot start with fewer open files."""
AMPLE_OPEN_FILES = 1024
_MAX_OPEN_FILES = 2**20
_RESERVED_FILES = 40


def open_standard_streams() -> None:
    """Opens closed standard streams on /dev/null. Otherwise later files and sockets would get their descriptors, and
    messages would be written to them.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets `descriptor`, the lowest free one
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal may lack characters of a model's name


def discard_closed_stderr() -> None:
    """Replaces a closed stderr by /dev/null. Otherwise Python would flush it again at exit and return status 120."""
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def exit_on_sigterm_or_sighup() -> None:
    """Both signals end the process at once with status 0, until `watch_signals` handles them."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _exit_now)


WatchSignals = Callable[["AbstractEventLoop", Callable[[int], None]], AbstractContextManager[None]]


@contextmanager
def watch_signals(loop: AbstractEventLoop, on_signal: Callable[[int], None]) -> Iterator[None]:
    """Calls `on_signal` in the loop. After the block, SIGHUP is ignored, and SIGINT and SIGTERM end the process at
    once.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    # The loop's own handlers would be removed when it closes; another SIGHUP would then kill the process.
    for number in numbers:
        signal.signal(number, lambda number, _: loop.call_soon_threadsafe(on_signal, number))
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(
                number, signal.SIG_IGN if number == signal.SIGHUP else lambda *_: os._exit(INTERRUPTED_STATUS)
            )


def dump_threads_on_signal() -> None:
    """SIGUSR1 then writes all threads' stacks to stderr, instead of ending the process."""
    faulthandler.register(signal.SIGUSR1, 2)


def _exit_now(number: int, frame: FrameType | None) -> None:
    os._exit(0)  # in a finalizer Python only reports SystemExit, and the server continues


def raise_open_file_limit() -> None:
    """Raises ConfigError if the limit is too low to start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
            soft = target
        except (OSError, ValueError):  # the system allows less than it reports
            pass
    if soft == resource.RLIM_INFINITY or soft >= AMPLE_OPEN_FILES:
        return
    if soft < MIN_OPEN_FILES:
        raise ConfigError(f"ulimit -n: {soft} open files are too few, at least {MIN_OPEN_FILES} are needed")
    log.warning("ulimit -n: %d open files leave room for about %d connections at once", soft, soft - _RESERVED_FILES)
