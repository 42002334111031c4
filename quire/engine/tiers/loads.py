"""Pages on their way from a tier to the device, and the sequences that wait for them.

A load is no admission: it brings pages into the device's prefix cache, and its sequences then go back to the queue,
where they find them as any other cached prefix.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.engine import clock
from quire.engine.core.block_pool import BlockPool
from quire.engine.core.executor import PageMover
from quire.engine.core.request import Request, RequestStatus
from quire.engine.tiers.tier import Page, Tier
from quire.engine.tiers.with_slots import state_key
from quire.engine.tiers.writer import Threads

log = logging.getLogger("quire.tiers")

_THREADS = 4
PATIENCE = 10.0
"""Seconds after which a sequence waits no longer for its pages, and computes them."""
_NAP = 0.005
"""Seconds that an engine with nothing to compute waits for pages before it looks for messages."""


Promote = Callable[[bytes, Page, Sequence[Tier], int], None]
"""(digest, page, the tiers above the one that had it, the generation of the load)."""


class State(NamedTuple):
    """A snapshot that comes with pages."""

    slot: int
    digest: bytes
    """Of the page at whose end it stands."""


@dataclass(eq=False, slots=True)
class Load:
    seqs: list[Request]
    """Those that wait for it."""
    cached: list[int]
    """Pages of the prefix that the device has, held so that they stay."""
    pages: list[int]
    """Those to be filled,"""
    digests: list[Sequence[bytes]]
    """and the hashes of their pieces; a page's own is the last."""
    tiers: list[str]
    """By page: the tier that is to have it."""
    began: float
    generation: int
    state: State | None = None
    """What comes behind the pages;"""
    has_state: bool = False
    """it has come."""
    filled: int = 0
    """How many pages have arrived, the first ones."""
    fetched: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By tier: pages, and the seconds they took."""
    running: bool = False
    """Whether a thread is at it."""
    ended: float = 0.0
    """When the last one arrived."""


class Loads:
    """`begin`, `take`, `forget` and `wait` are called by the engine's loop; the pages are fetched in threads."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        mover: PageMover,
        pool: BlockPool,
        promote: Promote,
        state_bytes: int = 0,
        threads: Threads = ThreadPoolExecutor,
        patience: float = PATIENCE,
    ) -> None:
        """`promote`: called in the threads with a page that was found below the first tier. `state_bytes`: of a
        snapshot."""
        self._state_bytes, self._patience = state_bytes, patience
        self._promote = promote
        self._tiers = tiers
        self._mover = mover
        self._pool = pool
        self._open: list[Load] = []
        self._overdue: list[Load] = []
        """Nobody waits for these any more; their pages are theirs until they end."""
        self._coming: dict[bytes, Load] = {}
        self._done: deque[Load] = deque()
        self._news = threading.Event()
        self._threads = threads(_THREADS, "kv-fetch")

    @property
    def busy(self) -> bool:
        """Whether pages are on their way that are worth waiting for."""
        return bool(self._open)

    @property
    def pending(self) -> bool:
        return bool(self._open or self._overdue)

    def join(self, request: Request, digest: bytes) -> bool:
        """Let a sequence wait for a page that is coming already; False: it is not."""
        if (load := self._coming.get(digest)) is None:
            return False
        load.seqs.append(request)
        request.status = RequestStatus.LOADING
        return True

    def begin(
        self,
        request: Request,
        cached: list[int],
        digests: list[Sequence[bytes]],
        tiers: list[str],
        generation: int,
        state: State | None = None,
    ) -> None:
        """Fetch the pages of these hashes, that come after `cached`, for a sequence. The pool must have room."""
        self._pool.ref(cached)
        pages = self._pool.allocate(len(digests))
        self._mover.claim(pages)
        load = Load([request], cached, pages, digests, tiers, clock.monotonic(), generation, state)
        self._open.append(load)
        self._coming |= {pieces[-1]: load for pieces in digests}
        request.status = RequestStatus.LOADING
        self._threads.submit(self._fetch, load)

    def take(self, now: float) -> tuple[list[Load], list[tuple[Load, list[Request]]]]:
        """The loads that have ended since the last call, each of which the caller ends by `release`; and those that
        take too long, each with the sequences that wait for it no longer."""
        self._news.clear()
        ended = []
        while self._done:
            load = self._done.popleft()
            (self._open if load in self._open else self._overdue).remove(load)
            ended.append(load)
        overdue = [load for load in self._open if now - load.began > self._patience]
        late = []
        for load in overdue:
            self._open.remove(load)
            self._overdue.append(load)
            late.append((load, load.seqs))
            load.seqs = []
        for load in [*ended, *overdue]:
            for pieces in load.digests:
                if self._coming.get(pieces[-1]) is load:
                    del self._coming[pieces[-1]]
        for seqs in [*(load.seqs for load in ended), *(seqs for _, seqs in late)]:
            for request in seqs:
                request.status = RequestStatus.WAITING
        return ended, late

    def release(self, load: Load) -> None:
        """Its pages are the cache's now."""
        self._pool.unref(load.cached + load.pages)

    def forget(self, request: Request) -> None:
        """The sequence has ended; what it waited for still arrives."""
        for load in self._open:
            if request in load.seqs:
                load.seqs.remove(request)

    def wait(self) -> None:
        self._news.wait(_NAP)

    def close(self) -> None:
        """Let the threads end after the page that each is at; waits for them, but not for ever."""
        for load in self._open:
            load.seqs = []
        self._threads.shutdown(wait=False, cancel_futures=True)
        until = clock.monotonic() + self._patience
        while any(not load.ended for load in self._open if load.running) and clock.monotonic() < until:
            self._news.clear()
            self._news.wait(_NAP)

    def _fetch(self, load: Load) -> None:
        """In a thread."""
        load.running = True
        try:
            for page, pieces in zip(load.pages, load.digests, strict=True):
                if not load.seqs or not self._fill(load, page, pieces[-1]):
                    break
            else:
                state = load.state
                load.has_state = state is not None and self._fill(load, ~state.slot, state_key(state.digest))
        except Exception:  # whatever it is, the sequence computes what is missing
            log.exception("KV pages cannot be copied to the device")
        load.ended = clock.monotonic()
        self._done.append(load)
        self._news.set()

    def _fill(self, load: Load, page: int, digest: bytes) -> bool:
        """Fetch a page, or ~slot, from the first tier that has it; False: none has."""
        size = self._mover.page_bytes if page >= 0 else self._state_bytes
        for index, tier in enumerate(self._tiers):
            began = clock.monotonic()
            found = tier.fetch(digest)
            if found is None or len(found) != size:
                continue
            self._mover.write(page, found)
            if page >= 0:
                pages, seconds = load.fetched.get(tier.name, (0, 0.0))
                load.fetched[tier.name] = (pages + 1, seconds + clock.monotonic() - began)
                load.filled += 1
            if index:
                self._promote(digest, found, self._tiers[:index], load.generation)
            return True
        return False
