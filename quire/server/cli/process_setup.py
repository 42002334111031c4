"""What a command needs of the process that it was started in: standard streams, open files, and signals that it may get
before it can handle them."""

from __future__ import annotations

import asyncio
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

from quire.engine.common.errors import ConfigError

log = logging.getLogger("quire.server")

INTERRUPTED_STATUS = 130
"""The exit status of a server that was to end at once."""
MIN_OPEN_FILES = 64
"""Open files without which no server and engine can start."""
AMPLE_OPEN_FILES = 1024
_MAX_OPEN_FILES = 2**20
_RESERVED_FILES = 40
"""What a server holds open beside its clients' connections."""


def open_standard_streams() -> None:
    """Open /dev/null in place of standard streams that are closed.

    Otherwise the next files and sockets would get their numbers, and whoever writes a message would write into those.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without a letter of a model's name still works


def discard_closed_stderr() -> None:
    """Drop messages that nobody can read any more, as where the terminal was closed: Python would try again to write
    them when it exits, and the exit status would be 120."""
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def exit_on_sigterm_or_sighup() -> None:
    """End the process with status 0 on SIGTERM or SIGHUP, until a server that drains handles them."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _exit_now)


WatchSignals = Callable[[Callable[[int], None]], AbstractContextManager[None]]


@contextmanager
def watch_signals(on_signal: Callable[[int], None]) -> Iterator[None]:
    """Call `on_signal`, in the running event loop, with each SIGINT, SIGTERM and SIGHUP that comes in the block. After
    it nothing is left to be done but to exit, and a signal for haste does that at once."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        numbers.append(signal.SIGHUP)
    loop = asyncio.get_running_loop()
    # Not the loop's own handlers: it restores the default when it closes, and one more SIGHUP would be the end.
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
    """Write what each thread is at to standard error on SIGUSR1, which would end the process."""
    faulthandler.register(signal.SIGUSR1, 2)


def _exit_now(number: int, frame: FrameType | None) -> None:
    os._exit(0)  # SystemExit would be lost in a finalizer, where Python only reports it, and the server would go on


def raise_open_file_limit() -> None:
    """Raise the limit of open files as far as the system allows, and say how many connections it leaves room for when
    these are few. Raises ConfigError for a limit with which nothing can start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
            soft = target
        except (OSError, ValueError):  # a system that allows less than it says
            pass
    if soft == resource.RLIM_INFINITY or soft >= AMPLE_OPEN_FILES:
        return
    if soft < MIN_OPEN_FILES:
        raise ConfigError(f"ulimit -n: {soft} open files are too few, at least {MIN_OPEN_FILES} are needed")
    log.warning("ulimit -n: %d open files leave room for about %d connections at once", soft, soft - _RESERVED_FILES)
