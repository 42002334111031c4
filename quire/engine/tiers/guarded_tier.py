"""A tier outside the engine's memory: what comes back is what was put there (sealed_blocks.py), or nothing; what it
raises is a miss; and it is given up where it hangs, as a disk may whose server is gone: nobody waits for it twice."""

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
"""Seconds after which a call hangs."""
_THREADS = 5
"""As many as may call at once: those that fetch, and the one that puts."""

Result = TypeVar("Result")


class GuardedTier:
    """A Tier whose calls end in time, but for `lookup`, which answers from memory. After one that did not, it has
    nothing and takes nothing, until the engine is built anew."""

    def __init__(self, tier: Tier, identity: bytes, timeout: float = CALL_TIMEOUT_SECONDS) -> None:
        self.name = tier.name
        self._timeout = timeout
        self.is_disabled = False
        self._tier = tier
        self._identity = identity
        self._last_call_failed = False
        self._calls: SimpleQueue[tuple[Callable[[], object], Future[object]] | None] = SimpleQueue()
        for number in range(_THREADS):  # daemons: an executor's threads would keep the process from its end
            Thread(target=self._run_calls, name=f"kv-{self.name}-{number}", daemon=True).start()

    def lookup(self, digest: bytes) -> bool:
        return not self.is_disabled and bool(self._call_or_none(lambda: self._tier.lookup(digest)))

    def fetch(self, digest: bytes) -> BlockContent | None:
        if (sealed := self._call_or_disable_on_timeout(lambda: self._tier.fetch(digest))) is None:
            return None
        if (page := unseal_block(self._identity, digest, sealed)) is None:
            log.warning("a page of the %s tier was not what was put there", self.name)
            self.drop(digest)
        return page

    def put(self, digest: bytes, page: BlockContent) -> None:
        self._call_or_disable_on_timeout(lambda: self._tier.put(digest, seal_block(self._identity, digest, page)))

    def drop(self, digest: bytes | None) -> None:
        if self.is_disabled:  # what is to be forgotten is, should it come back
            self._calls.put((lambda: self._call_or_none(lambda: self._tier.drop(digest)), Future()))
        else:
            self._call_or_disable_on_timeout(lambda: self._tier.drop(digest))

    def disable_and_stop_threads(self) -> None:
        """Let the threads end after the calls that they are at; others have no answer."""
        self.is_disabled = True
        for _ in range(_THREADS):
            self._calls.put(None)

    def _call_or_disable_on_timeout(self, call: Callable[[], Result]) -> Result | None:
        """What a call returns in time; None where it raises or does not end."""
        if self.is_disabled:
            return None
        future: Future[Result | None] = Future()
        self._calls.put((lambda: self._call_or_none(call), future))  # type: ignore[arg-type]
        try:
            return future.result(self._timeout)
        except TimeoutError:
            if not self.is_disabled:
                log.error("the %s tier hangs, and is not used any more", self.name)
            self.is_disabled = True
            return None

    def _run_calls(self) -> None:
        while (queued_call := self._calls.get()) is not None:
            call, future = queued_call
            future.set_result(call())

    def _call_or_none(self, call: Callable[[], Result]) -> Result | None:
        """What it returns; None where it raises, which is logged once until something works again."""
        try:
            result = call()
        except Exception:
            if not self._last_call_failed:
                log.exception("the %s tier failed", self.name)
            self._last_call_failed = True
            return None
        self._last_call_failed = False
        return result
