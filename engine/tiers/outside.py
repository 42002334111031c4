"""A tier outside the engine's memory: what comes back is what was put there (sealed.py), or nothing; what it raises is
a miss; and it is given up where it hangs, as a disk may whose server is gone: nobody waits for it twice."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

from quire.engine.tiers.sealed import seal, unseal
from quire.engine.tiers.tier import Page, Tier

log = logging.getLogger("quire.tiers")

PATIENCE = 30.0
"""Seconds after which a call hangs."""
_THREADS = 5
"""As many as may call at once: those that fetch, and the one that puts."""

Result = TypeVar("Result")


class OutsideTier:
    """A Tier whose calls end in time, but for `lookup`, which answers from memory. After one that did not, it has
    nothing and takes nothing, until the engine is built anew."""

    def __init__(self, tier: Tier, identity: bytes, patience: float = PATIENCE) -> None:
        self.name = tier.name
        self._patience = patience
        self.off = False
        self._tier = tier
        self._identity = identity
        self._failing = False
        self._calls: SimpleQueue[tuple[Callable[[], object], Future[object]] | None] = SimpleQueue()
        for number in range(_THREADS):  # daemons: an executor's threads would keep the process from its end
            Thread(target=self._work, name=f"kv-{self.name}-{number}", daemon=True).start()

    def lookup(self, digest: bytes) -> bool:
        return not self.off and bool(self._tried(lambda: self._tier.lookup(digest)))

    def fetch(self, digest: bytes) -> Page | None:
        if (sealed := self._within(lambda: self._tier.fetch(digest))) is None:
            return None
        if (page := unseal(self._identity, digest, sealed)) is None:
            log.warning("a page of the %s tier was not what was put there", self.name)
            self.drop(digest)
        return page

    def put(self, digest: bytes, page: Page) -> None:
        self._within(lambda: self._tier.put(digest, seal(self._identity, digest, page)))

    def drop(self, digest: bytes | None) -> None:
        if self.off:  # what is to be forgotten is, should it come back
            self._calls.put((lambda: self._tried(lambda: self._tier.drop(digest)), Future()))
        else:
            self._within(lambda: self._tier.drop(digest))

    def close(self) -> None:
        """Let the threads end after the calls that they are at; others have no answer."""
        self.off = True
        for _ in range(_THREADS):
            self._calls.put(None)

    def _within(self, call: Callable[[], Result]) -> Result | None:
        """What a call returns in time; None where it raises or does not end."""
        if self.off:
            return None
        done: Future[Result | None] = Future()
        self._calls.put((lambda: self._tried(call), done))  # type: ignore[arg-type]
        try:
            return done.result(self._patience)
        except TimeoutError:
            if not self.off:
                log.error("the %s tier hangs, and is not used any more", self.name)
            self.off = True
            return None

    def _work(self) -> None:
        while (asked := self._calls.get()) is not None:
            call, done = asked
            done.set_result(call())

    def _tried(self, call: Callable[[], Result]) -> Result | None:
        """What it returns; None where it raises, which is logged once until something works again."""
        try:
            result = call()
        except Exception:
            if not self._failing:
                log.exception("the %s tier failed", self.name)
            self._failing = True
            return None
        self._failing = False
        return result
