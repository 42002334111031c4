from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.replicated_client import processes
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import EngineError
from quire.engine.offline.in_process_client import InProcessClient
from quire.engine.offline.offline_model import OfflineModel
from quire.engine.receipts.model_hasher import ModelHasher

_T = TypeVar("_T")
_log = logging.getLogger("quire.engine.offline.running")


class RunningEngine:
    """Use it only on its event loop, through `run_coroutine` or `start_coroutine`."""

    def __init__(self, config: EngineConfig, *, multiprocessing: bool = False) -> None:
        """Raises errors of the engine's start."""
        self.config = config
        self.input_processor = OfflineModel(config)
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="quire-engine", daemon=True)
        thread.start()
        is_here = config.data_parallel_size == 1 and not multiprocessing
        self.client = EngineClient(InProcessClient(config)) if is_here else processes(config)
        self.hashes = ModelHasher(config, self.input_processor.tokenizer, self.client.engine_core.weights_paths)
        self.close = weakref.finalize(self, _stop_engine, self.client, self._loop, thread, self._pid)
        self.info = self.run_coroutine(self.client.engine_core.start())
        for note in self.info.notes:
            _log.warning("%s: %s", self.info.model, note)
        self.input_processor.pass_engine_info_to_adapters(self.info)

    def run_coroutine(self, work: Coroutine[Any, Any, _T]) -> _T:
        """An interrupt of the waiting thread cancels the coroutine."""
        future = self.start_coroutine(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start_coroutine(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Raises EngineError if the loop has ended or belongs to another process."""
        if not self.close.alive or self._pid != os.getpid():
            work.close()
            raise EngineError("this LLM was closed" if not self.close.alive else "this LLM belongs to another process")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def check_awake(self) -> None:
        """Raise EngineError while the model sleeps."""
        if self.client.engine_core.asleep:
            raise EngineError("the model is asleep: call wake_up() or load_weights() first")


def _stop_engine(client: EngineClient, loop: asyncio.AbstractEventLoop, thread: threading.Thread, pid: int) -> None:
    if pid != os.getpid():  # threads are not forked, so a forked process has no engine
        return
    client.engine_core.failure_callbacks.clear()
    stopping = asyncio.run_coroutine_threadsafe(client.engine_core.stop(), loop)
    stopping.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
    if threading.current_thread() is not thread:  # garbage collection on that thread may call this
        stopping.result()
        thread.join()


@contextmanager
def progress_bar(description: str, total: int, visible: bool) -> Iterator[Callable[[], None]]:
    """Call the yielded function for each finished item."""
    columns = (TextColumn(description), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not visible) as progress:
        bar = progress.add_task("", total=total)
        yield lambda: progress.advance(bar)
