"""Conversations that pause, while a tool runs or their user reads: which of the pool's pages are kept for their next
turn, and in which order they are given up when room is needed.

Nothing waits for a kept page: it counts as free, and is handed out after all pages that are not kept. A conversation is
known by the id that its requests have, or because a prompt goes on from an earlier sequence's end; one without an id
is kept from its second turn on, for most prompts are never gone on from. All together keep no more than a share of the
pool; beyond that, whoever keeps most gives up first.

What a page is worth is the time that its return saves, times how likely that is. Pages have equal bytes, and computing
one costs about the same, so the order is that of likelihoods alone: a conversation that has paused long, against the
pauses that it made before, goes first.

Where prefixes need snapshots of states beside pages, those that the next turn may begin with are kept with the pages,
of these too no more than a share. Who gives up its last one gives up all pages: behind no snapshot nothing begins.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from time import monotonic

from quire.engine.core.blocks import BlockPool
from quire.engine.core.sequence import Sequence
from quire.engine.core.state_snapshots import NoSnapshots, Standing
from quire.engine.core.stats import Counts
from quire.engine.types import KEEP_SECONDS

SHARE = 0.5
"""Of the pool's pages, the most that are kept."""
PAUSE_SECONDS = 60.0
"""What a first pause is taken to last."""
_LISTED = 4
"""Most times the share that pages are listed in all: one that several conversations begin with is kept once, and listed
for each."""
_AT_A_TIME = 64
"""Pages that are given up beside those that are needed now."""
MOST_SESSIONS = 4096
"""Conversations that are known, kept or not."""


@dataclass(eq=False, slots=True)
class Session:
    tenant: str
    name: str | None
    """What `_named` has it under; None for those without an id."""
    seconds: float = KEEP_SECONDS
    """For which it is kept after its last sequence."""
    turns: int = 0
    latest: str = ""
    """The id of its last request."""
    pages: list[int] = field(default_factory=list)
    """Those that are kept, from the beginning of its last sequence on."""
    snapshots: list[Standing] = field(default_factory=list)
    """Those that are kept."""
    tail: bytes = b""
    """The hash of its last full piece."""
    left: float = 0.0
    """When its last sequence gave back its pages."""
    pause: float = PAUSE_SECONDS
    """How long it pauses: the mean of its pauses, of which the later ones weigh more."""

    def overdue(self, now: float) -> float:
        """The larger, the less likely it is that it comes back."""
        return (now - self.left) / self.pause


class Sessions:
    def __init__(
        self,
        pool: BlockPool,
        share: float = SHARE,
        clock: Callable[[], float] = monotonic,
        snapshots: NoSnapshots | None = None,
        counts: Counts | None = None,
    ) -> None:
        """`share`: of the pool's pages, and of snapshots, the most that are kept."""
        self.counts = counts or Counts()
        self._pool, self._most, self._clock = pool, int(pool.num_blocks * share), clock
        pool.give_up = self._give_up
        self._snapshots = snapshots or NoSnapshots()
        if self._snapshots.pool is not None:
            self._snapshots.pool.give_up = self._give_up_snapshots
        self._share = share
        self._named: dict[str, Session] = {}
        self._by_tail: dict[tuple[str, bytes], Session] = {}
        """By tenant and `tail`: prompts of several tenants may have the same pages."""
        self._all: OrderedDict[Session, None] = OrderedDict()
        """The one that was used last at the end."""
        self._going: dict[str, Session] = {}
        """By id of a request that is running, or will again: what it is the next turn of."""
        self._held = Counter[str]()
        """Pages that each tenant's conversations keep; those of several count for each."""
        self._next_expiry = 0.0

    @property
    def known(self) -> SequenceOf[Session]:
        """All that are remembered, kept or not."""
        return list(self._all)

    def begin_step(self) -> None:
        """Give up those whose time is over."""
        now = self._clock()
        if now < self._next_expiry:
            return
        kept = [each for each in self._all if each.pages]
        for each in kept:
            if each.left + each.seconds <= now:
                self._give_back(each, len(each.pages))
        self._next_expiry = min((each.left + each.seconds for each in kept if each.pages), default=now + 1.0)

    def began(self, seq: Sequence, digests: SequenceOf[bytes]) -> None:
        """A sequence begins for the first time; `digests`: the hashes of its pieces."""
        found = self._find(seq, digests)
        if found is not None:
            found.pause = max((found.pause + self._clock() - found.left) / 2, 1.0)
            self.counts.session_returns += 1
            self.counts.session_return_tokens += seq.cached_tokens or 0
            self._going[seq.request.id] = found
            self._all.move_to_end(found)

    def left(self, seq: Sequence, pages: SequenceOf[int], digests: SequenceOf[bytes]) -> None:
        """A sequence is about to give back its pages; `pages`: those that can be found, `digests`: the hashes of its
        full pieces."""
        request = seq.request
        session = self._going.pop(request.id, None) or self._find(seq, digests)
        if not pages:
            return
        if session is None or session not in self._all:
            session = Session(request.tenant, _name(seq))
            self._all[session] = None
        session.turns += request.id != session.latest  # one that was preempted takes the same turn again
        session.latest, session.left = request.id, self._clock()
        session.seconds = request.keep_seconds or KEEP_SECONDS
        self._forget_tail(session)
        session.tail = digests[-1]
        self._by_tail[session.tenant, session.tail] = session
        if session.name is not None:
            self._named[session.name] = session
        if session.turns > 1 or session.name is not None or request.keep_seconds:
            self._hold(session, pages[: self._most], self._snapshots.standing(seq, min(len(pages), self._most)))
            self._next_expiry = min(self._next_expiry, session.left + session.seconds)
            self._bound()
        while len(self._all) > MOST_SESSIONS:
            self._forget(next(iter(self._all)))

    def forget(self) -> None:
        """Nothing is found any more."""
        for each in list(self._all):
            self._forget(each)

    def _find(self, seq: Sequence, digests: SequenceOf[bytes]) -> Session | None:
        """Whose next turn a sequence is: of the one that has its name, or at whose end it goes on."""
        name = _name(seq)
        if name is not None and (found := self._named.get(name)) is not None:
            return found
        tails = ((seq.request.tenant, digest) for digest in reversed(digests))
        before = next((found for tail in tails if (found := self._by_tail.get(tail))), None)
        if before is None or name is None or before.name == name:
            return before
        if before.name is not None:
            return None  # another conversation, which begins with the same
        before.name = name
        self._named[name] = before
        return before

    def _hold(self, session: Session, pages: SequenceOf[int], standing: SequenceOf[Standing]) -> None:
        """Keep these pages for a conversation, and these snapshots, and no others."""
        before, session.snapshots = session.snapshots, []
        self._keep_pages(session, pages)
        if self._snapshots.pool is not None:
            self._snapshots.pool.keep([each.snapshot for each in standing])
            session.snapshots = list(standing)
            self._unkeep(before)

    def _unkeep(self, snapshots: SequenceOf[Standing]) -> None:
        if snapshots:
            assert self._snapshots.pool is not None
            self._snapshots.pool.unkeep([each.snapshot for each in snapshots])

    def _keep_pages(self, session: Session, pages: SequenceOf[int]) -> None:
        same = next((at for at, pair in enumerate(zip(session.pages, pages, strict=False)) if pair[0] != pair[1]), None)
        same = min(len(session.pages), len(pages)) if same is None else same
        self._pool.keep(pages[same:])
        self._give_back(session, len(session.pages) - same)
        self.counts.kept_sessions += not session.pages and bool(pages)
        self._held[session.tenant] += len(pages) - same
        session.pages += pages[same:]

    def _give_back(self, session: Session, count: int) -> None:
        """Keep the last `count` pages of a conversation no more; the last one is the next to be handed out."""
        if count:
            first = max(len(session.pages) - count, 0)
            behind = [each for each in session.snapshots if each.pages > first]
            if behind and len(behind) == len(session.snapshots):
                first = 0
            session.snapshots = [each for each in session.snapshots if each.pages <= first]
            self._unkeep(behind)
            self._pool.unkeep(session.pages[first:])
            self._held[session.tenant] -= len(session.pages) - first
            del session.pages[first:]
            self.counts.kept_sessions -= not session.pages
            if not self._held[session.tenant]:
                del self._held[session.tenant]

    def _bound(self) -> None:
        """Keep to the share: who keeps most gives up first, of that tenant the conversation that is least likely to
        come back."""
        while (excess := max(self._pool.num_kept - self._most, self._held.total() - _LISTED * self._most)) > 0:
            (tenant, _), now = self._held.most_common(1)[0], self._clock()
            own = (each for each in self._all if each.tenant == tenant and each.pages)
            self._give_back(max(own, key=lambda each: each.overdue(now)), excess)
        pool = self._snapshots.pool
        while pool is not None and pool.num_kept > int(pool.num_blocks * self._share):
            having, now = [each for each in self._all if each.snapshots], self._clock()
            held = Counter(each.tenant for each in having)
            own = (each for each in having if each.tenant == held.most_common(1)[0][0])
            last = max(own, key=lambda each: each.overdue(now))
            self._give_back(last, len(last.pages))

    def _give_up(self, count: int) -> None:
        """See BlockPool: those that are least likely to come back give up pages, the last ones first."""
        now = self._clock()
        wanted = self._pool.num_unkept + count
        enough = wanted + min(_AT_A_TIME, self._pool.num_blocks // 16)
        kept = sorted((each for each in self._all if each.pages), key=lambda each: each.overdue(now))
        while kept and self._pool.num_unkept < wanted:
            session = kept.pop()
            self.counts.sessions_given_up += 1
            while session.pages and self._pool.num_unkept < enough:  # one that is held, or kept by others, is not free
                self._give_back(session, enough - self._pool.num_unkept)

    def _give_up_snapshots(self, count: int) -> None:
        """The same of so many snapshots."""
        pool, now = self._snapshots.pool, self._clock()
        assert pool is not None
        wanted = pool.num_unkept + count
        kept = sorted((each for each in self._all if each.snapshots), key=lambda each: each.overdue(now))
        while kept and pool.num_unkept < wanted:
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


def _name(seq: Sequence) -> str | None:
    """Of its session, which no other tenant's, salt's or adapter's has."""
    request = seq.request
    if not request.session:
        return None
    return repr(
        (request.tenant, request.cache_salt, "" if request.adapter is None else request.adapter.digest, request.session)
    )
