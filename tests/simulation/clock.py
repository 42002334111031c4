"""An event loop with simulated time, whose threads are turns of the loop: one seed determines the order."""

from __future__ import annotations

import asyncio
import random
import selectors
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest

from tests.machine import set_clock, set_random

EPOCH = 1_800_000_000.0
"""Seconds of the Unix clock at which every simulation begins."""

MOST_TURNS = 200_000


class Gone(Exception):
    """Raised by calls of a process that has ended."""


class Owned:
    """A process, as the loop sees it."""

    dead = False
    asks = False
    """Whether its threads wait for other processes."""

    def __init__(self) -> None:
        self.tasks: dict[asyncio.Task[Any], None] = {}
        """Those that have not ended, in the order of their begin."""


PROCESS: ContextVar[Owned | None] = ContextVar("process", default=None)
"""Whose task this is; None: somebody outside, whom nothing ends."""


class _Selector(selectors.SelectSelector):
    """Has no external events: waiting moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits for somebody else"
        self.now += max(timeout, 0)
        self.turns += 1
        assert self.turns < MOST_TURNS, "somebody asks again and again"
        return []


class Loop(asyncio.SelectorEventLoop):
    def __init__(self, rng: random.Random) -> None:
        self.selector = _Selector()
        super().__init__(self.selector)
        self._rng = rng
        self.tasks = 0
        """That were ever begun."""
        self.set_task_factory(_owned)

    def time(self) -> float:
        return self.selector.now

    def end_all(self) -> None:
        """Cancel what still runs, after a failure."""
        self.selector.turns = 0
        for _ in range(20):
            if tasks := asyncio.all_tasks(self):
                for task in tasks:
                    task.cancel()
                self.run_until_complete(asyncio.wait(tasks, timeout=1))

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """A thread's work is done at one moment, some time from now."""
        future, process = self.create_future(), PROCESS.get()
        delay = self._rng.choice((0.0, 0.0002, 0.001, 0.004, 0.03))
        self.call_later(delay, self._do, future, process, func, args)
        return future

    def _do(
        self, future: asyncio.Future[Any], process: Owned | None, func: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        if process is not None and process.dead:
            if not future.done():
                future.set_exception(Gone())
            return
        thread = _Thread(func, args, future)
        if process is not None and process.asks:
            thread.begin()
        else:
            thread.do()
            thread.tell()


class _Thread:
    """A thread's work. If it waits for other processes it is a real thread, but it and the loop never run at the same
    time.
    """

    here = threading.local()
    """Its `thread` is the one that runs."""

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], future: asyncio.Future[Any]) -> None:
        self._func, self._args, self._future = func, args, future
        self._result: Any = None
        self._error: BaseException | None = None
        self._ended = False
        self._its_turn, self._our_turn = threading.Semaphore(0), threading.Semaphore(0)

    def do(self) -> None:
        try:
            self._result = self._func(*self._args)
        except BaseException as error:
            self._error = error
        self._ended = True

    def tell(self) -> None:
        if not self._ended or self._future.done():
            return
        if self._error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(self._error)

    def begin(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()
        self._our_turn.acquire()
        self.tell()

    def _run(self) -> None:
        self.here.thread = self
        self.do()
        self._our_turn.release()

    def wait(self) -> None:
        """In the thread: give the loop its turn, until `go_on`."""
        self._our_turn.release()
        self._its_turn.acquire()

    def go_on(self) -> None:
        self._its_turn.release()
        self._our_turn.acquire()
        self.tell()


class Awaited:
    """A thread's result from the loop, instead of run_coroutine_threadsafe's future."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> None:
        self._thread: _Thread = _Thread.here.thread
        self._process = PROCESS.get()
        self._task = loop.create_task(coroutine)
        self._task.add_done_callback(lambda _: self._thread.go_on())

    def result(self) -> Any:
        self._thread.wait()
        if self._task.cancelled() or (self._process is not None and self._process.dead):
            raise CancelledError  # as asyncio's future where the loop ends
        return self._task.result()


class _Task(asyncio.Task[Any]):
    """Orders sets of tasks by creation instead of by memory address."""

    def __init__(self, *args: Any, number: int, **more: Any) -> None:
        self._number = number
        super().__init__(*args, **more)

    def __hash__(self) -> int:
        return self._number


def _owned(loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
    assert isinstance(loop, Loop)
    loop.tasks += 1
    task = _Task(coroutine, loop=loop, number=loop.tasks, **more)
    if (process := PROCESS.get()) is not None:
        process.tasks[task] = None
        task.add_done_callback(lambda ended: process.tasks.pop(ended, None))
    return task


@contextmanager
def virtual_time(rng: random.Random) -> Iterator[Loop]:
    """A loop; within the block its clock is that of all, and what is drawn at random comes from `rng`."""
    loop = Loop(rng)
    with pytest.MonkeyPatch.context() as patch:
        set_clock(patch, monotonic=loop.time, time=lambda: EPOCH + loop.time())
        set_random(patch, rng.getrandbits)
        patch.setattr("anyio.to_thread.run_sync", _in_turn)  # Starlette's, for the files that it sends
        try:
            yield loop
        finally:
            loop.end_all()
            loop.close()


async def _in_turn(func: Callable[..., Any], *args: Any, **_: Any) -> Any:
    return await asyncio.to_thread(func, *args)
