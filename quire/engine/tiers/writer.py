"""Pages on their way from the device to the tiers: copied in a thread, behind the computation.

A page is copied when a sequence that has it ends, or is preempted; the device's cache keeps it too, until its place is
needed. So what is taken then has mostly been copied; what has not is copied at once, before it is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from threading import Lock

from quire.engine.core.executor import PageMover
from quire.engine.tiers.tier import Page, Tier

_MOST_UNWRITTEN = 256 * 2**20
"""Bytes of copies that wait to be put where they are to go; pages beyond that are not kept."""

Threads = Callable[[int, str], Executor]
"""Makes so many threads of this name."""
_PATIENCE = 30.0
"""Seconds that the end of an engine waits for what is on its way."""


class Writer:
    """`keep`, `secure` and `reset` are called by the engine's loop."""

    def __init__(self, tiers: Sequence[Tier], mover: PageMover, threads: Threads = ThreadPoolExecutor) -> None:
        self._tiers = tiers
        self._mover = mover
        self._leaving: dict[int, bytes] = {}
        """The pages that are to be copied, and their hashes. They are full: nobody writes to them until the pool hands
        them out again, and `secure` comes before that."""
        self._copying = Lock()
        """Held while a page is copied."""
        self._putting = Lock()
        """Held while a copy is put into tiers."""
        self.generation = 0
        """Grows with every reset: what began to come or to go before it is not for the cache any more."""
        self._unwritten = 0
        """Bytes of the copies that `secure` made and that are not put yet."""
        self._thread = threads(1, "kv-put")
        self.stored: dict[str, int] = {tier.name: 0 for tier in tiers}
        """Pages put, by tier."""
        self.lost = 0
        """Pages that were not kept, for they came faster than they could be written."""
        self.waits = 0
        """Pages that the loop had to copy itself."""

    def keep(self, pages: Sequence[tuple[int, bytes]]) -> None:
        """Copy these full pages to the tiers that lack them. The first ones of a prefix count as used last."""
        new = []
        for page, digest in reversed(pages):
            there = [tier.lookup(digest) for tier in self._tiers]  # each is asked: asking counts as a use
            if not all(there) and page not in self._leaving:
                self._leaving[page] = digest
                new.append(page)
        if new:
            self._thread.submit(self._copy, new, self.generation)

    def secure(self, pages: Sequence[int]) -> None:
        """These pages are about to be overwritten: copy those now that were to be."""
        if not self._leaving:
            return
        for page in pages:
            if page not in self._leaving:
                continue
            with self._copying:  # the thread may be at this very page
                digest = self._leaving.pop(page, None)
                if digest is None:
                    continue
                if self._unwritten > _MOST_UNWRITTEN:
                    self.lost += 1
                    continue
                copy = self._mover.read(page)
                self._unwritten += len(copy)
            self.waits += 1
            self._thread.submit(self._put_secured, digest, copy, self.generation)

    def reset(self) -> None:
        """Forget what is on its way, and all that the tiers have."""
        with self._copying, self._putting:
            self.generation += 1
            self._leaving.clear()
            for tier in self._tiers:
                tier.drop(None)

    def close(self) -> None:
        """Let the thread end when what is on its way is put; waits for it, but not for ever."""
        last = self._thread.submit(lambda: None)
        self._thread.shutdown(wait=False)
        wait([last], _PATIENCE)

    def promote(self, digest: bytes, copy: Page, tiers: Sequence[Tier], generation: int) -> None:
        """Put a page that came from a tier into those above it. Called by any thread."""
        with self._putting:
            if generation == self.generation:
                for tier in tiers:
                    tier.put(digest, copy)

    def _copy(self, pages: Sequence[int], generation: int) -> None:
        """In the thread."""
        for page in pages:
            with self._copying:
                digest = self._leaving.get(page)
                if digest is None or generation != self.generation:
                    continue
                copy = self._mover.read(page)
                del self._leaving[page]
            self._put(digest, copy, generation)

    def _put_secured(self, digest: bytes, copy: Page, generation: int) -> None:
        """In the thread."""
        self._put(digest, copy, generation)
        with self._copying:
            self._unwritten -= len(copy)

    def _put(self, digest: bytes, copy: Page, generation: int) -> None:
        for tier in self._tiers:
            with self._putting:
                if generation != self.generation:
                    return
                if not tier.lookup(digest):
                    tier.put(digest, copy)
                    is_page = len(copy) == self._mover.page_bytes  # else it is a snapshot
                    self.stored[tier.name] += is_page and tier.lookup(digest)
