from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

from quire.engine.tiers.sealed_blocks import seal_block, unseal_block
from quire.engine.tiers.tier import BlockContent, Tier

log = logging.getLogger("quire.tiers")

CALL_TIMEOUT_SECONDS = 30.0
_THREADS = 5
"""One thread for each possible caller: the loading threads and the storing thread."""

Result = TypeVar("Result")


class GuardedTier:
    """Protects the engine from a tier outside its memory. Blocks are verified, and exceptions count as misses. A call
    that exceeds the timeout disables the tier until the engine is rebuilt. `lookup` has no timeout.
    """

    def __init__(self, tier: Tier, identity: bytes, timeout: float = CALL_TIMEOUT_SECONDS) -> None:
        self.name = tier.name
        self._timeout = timeout
        self.is_disabled = False
        self._tier = tier
        self._identity = identity
        self._last_call_failed = False
        self._calls: SimpleQueue[tuple[Callable[[], object], Future[object]] | None] = SimpleQueue()
        for number in range(_THREADS):  # daemon threads, because an executor's threads would block the process's exit
            Thread(target=self._run_calls, name=f"kv-{self.name}-{number}", daemon=True).start()

    def lookup(self, digest: bytes) -> bool:
        return not self.is_disabled and bool(self._call_or_none(lambda: self._tier.lookup(digest)))

    def fetch(self, digest: bytes) -> BlockContent | None:
        if (sealed := self._call_or_disable_on_timeout(lambda: self._tier.fetch(digest))) is None:
            return None
        if (page := unseal_block(self._identity, digest, sealed)) is None:
            log.warning("a block of the %s tier differs from what was stored there", self.name)
            self.drop(digest)
        return page

    def put(self, digest: bytes, page: BlockContent) -> None:
        self._call_or_disable_on_timeout(lambda: self._tier.put(digest, seal_block(self._identity, digest, page)))

    def drop(self, digest: bytes | None) -> None:
        if self.is_disabled:  # drop it anyway, in case the tier recovers
            self._calls.put((lambda: self._call_or_none(lambda: self._tier.drop(digest)), Future()))
        else:
            self._call_or_disable_on_timeout(lambda: self._tier.drop(digest))

    def disable_and_stop_threads(self) -> None:
        self.is_disabled = True
        for _ in range(_THREADS):
            self._calls.put(None)

    def _call_or_disable_on_timeout(self, call: Callable[[], Result]) -> Result | None:
        if self.is_disabled:
            return None
        future: Future[Result | None] = Future()
        self._calls.put((lambda: self._call_or_none(call), future))  # type: ignore[arg-type]
        try:
            return future.result(self._timeout)
        except TimeoutError:
            if not self.is_disabled:
                log.error("the %s tier hangs and is no longer used", self.name)
            self.is_disabled = True
            return None

    def _run_calls(self) -> None:
        while (queued_call := self._calls.get()) is not None:
            call, future = queued_call
            future.set_result(call())

    def _call_or_none(self, call: Callable[[], Result]) -> Result | None:
        """Of successive exceptions, only the first is logged."""
        try:
            result = call()
        except Exception:
            if not self._last_call_failed:
                log.exception("the %s tier failed", self.name)
            self._last_call_failed = True
            return None
        self._last_call_failed = False
        return result
