"""A conversation pauses while a tool runs or its user reads. This module decides which pages of the pool are kept for
its next turn, and which are given up first when the pool needs room.

Nothing waits for a kept page. It counts as free, but the pool hands it out only after all pages that are not kept.

Two things identify a conversation: the session id of its requests, or a prompt that continues where an earlier sequence
ended. A conversation without an id is kept from its second turn on, because most prompts are never continued. All
conversations together keep at most a share of the pool. Above that share, the tenant with the most kept pages gives up
pages first.

The value of a page is the time that it would save, times the probability that its conversation continues. All pages
have the same size and cost about the same to compute. So only the probability matters: the conversation that has paused
longest, compared with its earlier pauses, gives up its pages first.

Some models need a snapshot of their state beside the pages. Then the snapshots from which the next turn can start are
kept too, again at most a share of them. A conversation that gives up its last snapshot also gives up all its pages,
because no sequence can start without a snapshot.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.engine import clock
from quire.engine.core.block_pool import BlockPool
from quire.engine.core.request import Request
from quire.engine.core.state_snapshots import NoSnapshots, Standing
from quire.engine.core.stats import Counts
from quire.engine.types import KEEP_SECONDS

SHARE = 0.5
"""The largest part of the pool's pages that is kept."""
PAUSE_SECONDS = 60.0
"""How long the first pause is assumed to last."""
_LISTED = 4
"""Several conversations can start with the same page. The page is kept once, but each of them lists it. All lists
together may have this many times the share's pages."""
_AT_A_TIME = 64
"""How many more pages are given up than are needed now."""
MOST_SESSIONS = 4096
"""How many conversations are remembered, with or without kept pages."""


@dataclass(eq=False, slots=True)
class Session:
    tenant: str
    name: str | None
    """Its key in `_named`; None: it has no id."""
    seconds: float = KEEP_SECONDS
    """How long its pages are kept after its last sequence."""
    turns: int = 0
    latest: str = ""
    """The id of its last request."""
    pages: list[int] = field(default_factory=list)
    """The kept pages, from the start of its last sequence."""
    snapshots: list[Standing] = field(default_factory=list)
    """The kept snapshots."""
    tail: bytes = b""
    """The hash of the last full piece of its last sequence."""
    left: float = 0.0
    """When its last sequence released its pages."""
    pause: float = PAUSE_SECONDS
    """The mean length of its pauses. Later pauses have more weight."""

    def overdue(self, now: float) -> float:
        """How long it has paused, relative to its mean pause. A larger value means that it continues less likely."""
        return (now - self.left) / self.pause


class Sessions:
    def __init__(
        self,
        pool: BlockPool,
        share: float = SHARE,
        clock: Callable[[], float] = lambda: clock.monotonic(),
        snapshots: NoSnapshots | None = None,
        counts: Counts | None = None,
    ) -> None:
        """`share`: the largest part of the pool's pages, and of the snapshots, that is kept."""
        self.counts = counts or Counts()
        self._pool, self._most, self._clock = pool, int(pool.num_blocks * share), clock
        pool.unpin_some = self._give_up
        self._snapshots = snapshots or NoSnapshots()
        if self._snapshots.pool is not None:
            self._snapshots.pool.unpin_some = self._give_up_snapshots
        self._share = share
        self._named: dict[str, Session] = {}
        self._by_tail: dict[tuple[str, bytes], Session] = {}
        """By tenant and `tail`, because prompts of several tenants may share pages."""
        self._all: OrderedDict[Session, None] = OrderedDict()
        """In the order of their last use, the most recent at the end."""
        self._going: dict[str, Session] = {}
        """By request id: the conversation that a running or preempted request continues."""
        self._held = Counter[str]()
        """By tenant: the number of pages that its conversations list. A page that several list counts several times."""
        self._next_expiry = 0.0

    @property
    def known(self) -> Sequence[Session]:
        """All remembered conversations."""
        return list(self._all)

    def begin_step(self) -> None:
        """Give up the pages of conversations whose time is over."""
        now = self._clock()
        if now < self._next_expiry:
            return
        kept = [each for each in self._all if each.pages]
        for each in kept:
            if each.left + each.seconds <= now:
                self._give_back(each, len(each.pages))
        self._next_expiry = min((each.left + each.seconds for each in kept if each.pages), default=now + 1.0)

    def began(self, request: Request, digests: Sequence[bytes]) -> None:
        """A sequence starts for the first time. `digests`: the hashes of its pieces."""
        found = self._find(request, digests)
        if found is not None:
            found.pause = max((found.pause + self._clock() - found.left) / 2, 1.0)
            self.counts.session_returns += 1
            self.counts.session_return_tokens += request.num_cached_tokens or 0
            self._going[request.engine_request.id] = found
            self._all.move_to_end(found)

    def left(self, request: Request, pages: Sequence[int], digests: Sequence[bytes]) -> None:
        """A sequence is about to release its pages. `pages`: those in the prefix cache; `digests`: the hashes of its
        full pieces."""
        engine_request = request.engine_request
        session = self._going.pop(engine_request.id, None) or self._find(request, digests)
        if not pages:
            return
        if session is None or session not in self._all:
            session = Session(engine_request.tenant, _name(request))
            self._all[session] = None
        session.turns += engine_request.id != session.latest  # a preempted request repeats its turn
        session.latest, session.left = engine_request.id, self._clock()
        session.seconds = engine_request.keep_seconds or KEEP_SECONDS
        self._forget_tail(session)
        session.tail = digests[-1]
        self._by_tail[session.tenant, session.tail] = session
        if session.name is not None:
            self._named[session.name] = session
        if session.turns > 1 or session.name is not None or engine_request.keep_seconds:
            self._hold(session, pages[: self._most], self._snapshots.standing(request, min(len(pages), self._most)))
            self._next_expiry = min(self._next_expiry, session.left + session.seconds)
            self._bound()
        while len(self._all) > MOST_SESSIONS:
            self._forget(next(iter(self._all)))

    def forget(self) -> None:
        """Forget all conversations."""
        for each in list(self._all):
            self._forget(each)

    def _find(self, request: Request, digests: Sequence[bytes]) -> Session | None:
        """The conversation that a sequence continues: the one with its name, or the one at whose end it starts."""
        name = _name(request)
        if name is not None and (found := self._named.get(name)) is not None:
            return found
        tails = ((request.engine_request.tenant, digest) for digest in reversed(digests))
        before = next((found for tail in tails if (found := self._by_tail.get(tail))), None)
        if before is None or name is None or before.name == name:
            return before
        if before.name is not None:
            return None  # another conversation that starts with the same tokens
        before.name = name
        self._named[name] = before
        return before

    def _hold(self, session: Session, pages: Sequence[int], standing: Sequence[Standing]) -> None:
        """Keep exactly these pages and these snapshots for a conversation."""
        before, session.snapshots = session.snapshots, []
        self._keep_pages(session, pages)
        if self._snapshots.pool is not None:
            self._snapshots.pool.pin([each.snapshot for each in standing])
            session.snapshots = list(standing)
            self._unkeep(before)

    def _unkeep(self, snapshots: Sequence[Standing]) -> None:
        if snapshots:
            assert self._snapshots.pool is not None
            self._snapshots.pool.unpin([each.snapshot for each in snapshots])

    def _keep_pages(self, session: Session, pages: Sequence[int]) -> None:
        same = next((at for at, pair in enumerate(zip(session.pages, pages, strict=False)) if pair[0] != pair[1]), None)
        same = min(len(session.pages), len(pages)) if same is None else same
        self._pool.pin(pages[same:])
        self._give_back(session, len(session.pages) - same)
        self.counts.kept_sessions += not session.pages and bool(pages)
        self._held[session.tenant] += len(pages) - same
        session.pages += pages[same:]

    def _give_back(self, session: Session, count: int) -> None:
        """Stop keeping the last `count` pages of a conversation. The pool hands out the last one first."""
        if count:
            first = max(len(session.pages) - count, 0)
            behind = [each for each in session.snapshots if each.pages > first]
            if behind and len(behind) == len(session.snapshots):
                first = 0
            session.snapshots = [each for each in session.snapshots if each.pages <= first]
            self._unkeep(behind)
            self._pool.unpin(session.pages[first:])
            self._held[session.tenant] -= len(session.pages) - first
            del session.pages[first:]
            self.counts.kept_sessions -= not session.pages
            if not self._held[session.tenant]:
                del self._held[session.tenant]

    def _bound(self) -> None:
        """Enforce the share. The tenant with the most pages gives up first, and of that tenant the conversation that is
        least likely to continue."""
        while (excess := max(self._pool.num_pinned - self._most, self._held.total() - _LISTED * self._most)) > 0:
            (tenant, _), now = self._held.most_common(1)[0], self._clock()
            own = (each for each in self._all if each.tenant == tenant and each.pages)
            self._give_back(max(own, key=lambda each: each.overdue(now)), excess)
        pool = self._snapshots.pool
        while pool is not None and pool.num_pinned > int(pool.num_blocks * self._share):
            having, now = [each for each in self._all if each.snapshots], self._clock()
            held = Counter(each.tenant for each in having)
            own = (each for each in having if each.tenant == held.most_common(1)[0][0])
            last = max(own, key=lambda each: each.overdue(now))
            self._give_back(last, len(last.pages))

    def _give_up(self, count: int) -> None:
        """As BlockPool.give_up says. The conversations that are least likely to continue give up pages, the last pages
        first."""
        now = self._clock()
        wanted = self._pool.num_free_unpinned + count
        enough = wanted + min(_AT_A_TIME, self._pool.num_blocks // 16)
        kept = sorted((each for each in self._all if each.pages), key=lambda each: each.overdue(now))
        while kept and self._pool.num_free_unpinned < wanted:
            session = kept.pop()
            self.counts.sessions_given_up += 1
            while (
                session.pages and self._pool.num_free_unpinned < enough
            ):  # pages that others hold or keep are not free
                self._give_back(session, enough - self._pool.num_free_unpinned)

    def _give_up_snapshots(self, count: int) -> None:
        """The same for `count` snapshots."""
        pool, now = self._snapshots.pool, self._clock()
        assert pool is not None
        wanted = pool.num_free_unpinned + count
        kept = sorted((each for each in self._all if each.snapshots), key=lambda each: each.overdue(now))
        while kept and pool.num_free_unpinned < wanted:
            self.counts.sessions_given_up += 1
            session = kept.pop()
            self._give_back(session, len(session.pages))

    def _forget(self, session: Session) -> None:
        self._give_back(session, len(session.pages))
        del self._all[session]
        self._forget_tail(session)
        if session.name is not None and self._named.get(session.name) is session:
            del self._named[session.name]

    def _forget_tail(self, session: Session) -> None:
        if self._by_tail.get((session.tenant, session.tail)) is session:
            del self._by_tail[session.tenant, session.tail]


def _name(request: Request) -> str | None:
    """A key for the sequence's session. Requests of another tenant, cache salt or adapter have another key."""
    engine_request = request.engine_request
    if not engine_request.session:
        return None
    return repr(
        (
            engine_request.tenant,
            engine_request.cache_salt,
            "" if engine_request.adapter is None else engine_request.adapter.digest,
            engine_request.session,
        )
    )
