"""Pins a paused conversation's KV blocks for its next turn. Pinned blocks count as free but are allocated last.

A session id identifies a conversation. Without an id, a prompt that continues an earlier request belongs to that
request's conversation, and blocks are pinned from the second turn on or if keep_seconds is set, because most prompts
are never continued. Above a share of the pool, the tenant with the most pinned blocks loses blocks first: those of its
conversation with the longest pause relative to earlier pauses. With recurrent state, snapshots are pinned too. A
conversation that loses its last snapshot loses all its blocks, because no request can start from them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.engine.common import clock
from quire.engine.common.types import DEFAULT_KEEP_SECONDS
from quire.engine.core.kv_cache.block_pool import BlockPool
from quire.engine.core.kv_cache.state_snapshots import SnapshotPosition, StateSnapshots
from quire.engine.core.request import Request
from quire.engine.core.stats import LiveCounters

MAX_PINNED_SHARE = 0.5
DEFAULT_PAUSE_SECONDS = 60.0
_MAX_LISTED_RATIO = 4
"""Several conversations may list the same block. Their lists together are at most this many times as long as the
maximum number of pinned blocks.
"""
_EXTRA_UNPINNED = 64
"""If blocks must be unpinned, this many more are unpinned, but at most 1/16 of the pool."""
MAX_SESSIONS = 4096


@dataclass(eq=False, slots=True)
class Session:
    tenant: str
    key: str | None
    """None if the request has no session id."""
    keep_seconds: float = DEFAULT_KEEP_SECONDS
    num_turns: int = 0
    last_request_id: str = ""
    blocks: list[int] = field(default_factory=list)
    """The last request's first blocks, which are pinned."""
    snapshots: list[SnapshotPosition] = field(default_factory=list)
    tail_hash: bytes = b""
    paused_at: float = 0.0
    mean_pause: float = DEFAULT_PAUSE_SECONDS
    """Moving average in seconds, at least 1. Later pauses weigh more."""

    def overdue_ratio(self, now: float) -> float:
        return (now - self.paused_at) / self.mean_pause


class PinnedSessions:
    def __init__(
        self,
        pool: BlockPool,
        share: float = MAX_PINNED_SHARE,
        clock: Callable[[], float] = lambda: clock.monotonic(),
        snapshots: StateSnapshots | None = None,
        counts: LiveCounters | None = None,
    ) -> None:
        """`share`: maximum share of all blocks, and of all snapshots, that is pinned."""
        self.counts = counts or LiveCounters()
        self._pool = pool
        self._max_pinned = int(pool.num_blocks * share)
        self._clock = clock
        pool.unpin_some = self._unpin_some_blocks
        self._snapshots = snapshots
        if snapshots is not None:
            snapshots.pool.unpin_some = self._unpin_some_snapshots
        self._share = share
        self._by_key: dict[str, Session] = {}
        self._by_tail: dict[tuple[str, bytes], Session] = {}
        """Keyed by (tenant, last hash), because tenants may share blocks."""
        self._sessions: OrderedDict[Session, None] = OrderedDict()
        """Least recently used first."""
        self._running: dict[str, Session] = {}
        self._num_listed = Counter[str]()
        self._next_expiry = 0.0

    @property
    def remembered_sessions(self) -> Sequence[Session]:
        return list(self._sessions)

    def unpin_expired(self) -> None:
        now = self._clock()
        if now < self._next_expiry:
            return
        pinned_sessions = [each for each in self._sessions if each.blocks]
        for each in pinned_sessions:
            if each.paused_at + each.keep_seconds <= now:
                self._unpin_last_blocks(each, len(each.blocks))
        self._next_expiry = min(
            (each.paused_at + each.keep_seconds for each in pinned_sessions if each.blocks), default=now + 1.0
        )

    def record_session_resume(self, request: Request, digests: Sequence[bytes]) -> None:
        session = self._find_session_adopting_key(request, digests)
        if session is not None:
            session.mean_pause = max((session.mean_pause + self._clock() - session.paused_at) / 2, 1.0)
            self.counts.session_returns += 1
            self.counts.session_return_tokens += request.num_cached_tokens or 0
            self._running[request.engine_request.id] = session
            self._sessions.move_to_end(session)

    def pause_session(self, request: Request, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """`blocks` are in the prefix cache. Call before the request frees them."""
        engine_request = request.engine_request
        session = self._running.pop(engine_request.id, None) or self._find_session_adopting_key(request, digests)
        if not blocks:
            return
        if session is None or session not in self._sessions:
            session = Session(engine_request.tenant, _session_key(request))
            self._sessions[session] = None
        session.num_turns += engine_request.id != session.last_request_id  # preempted requests repeat a turn
        session.last_request_id, session.paused_at = engine_request.id, self._clock()
        session.keep_seconds = engine_request.keep_seconds or DEFAULT_KEEP_SECONDS
        self._forget_tail_hash(session)
        session.tail_hash = digests[-1]
        self._by_tail[session.tenant, session.tail_hash] = session
        if session.key is not None:
            self._by_key[session.key] = session
        if session.num_turns > 1 or session.key is not None or engine_request.keep_seconds:
            self._replace_session_pins(
                session,
                blocks[: self._max_pinned],
                []
                if self._snapshots is None
                else self._snapshots.snapshots_for_next_turn(request, min(len(blocks), self._max_pinned)),
            )
            self._next_expiry = min(self._next_expiry, session.paused_at + session.keep_seconds)
            self._enforce_limits()
        while len(self._sessions) > MAX_SESSIONS:
            self._forget_session(next(iter(self._sessions)))

    def clear_sessions(self) -> None:
        for each in list(self._sessions):
            self._forget_session(each)

    def _find_session_adopting_key(self, request: Request, digests: Sequence[bytes]) -> Session | None:
        """A session found by its hash gets the request's key; None if it has another key."""
        key = _session_key(request)
        if key is not None and (session := self._by_key.get(key)) is not None:
            return session
        tails = ((request.engine_request.tenant, digest) for digest in reversed(digests))
        candidate = next((session for tail in tails if (session := self._by_tail.get(tail))), None)
        if candidate is None or key is None or candidate.key == key:
            return candidate
        if candidate.key is not None:
            return None  # another conversation, which starts with the same tokens
        candidate.key = key
        self._by_key[key] = candidate
        return candidate

    def _replace_session_pins(
        self, session: Session, blocks: Sequence[int], snapshots: Sequence[SnapshotPosition]
    ) -> None:
        old_snapshots, session.snapshots = session.snapshots, []
        self._replace_pinned_blocks(session, blocks)
        if self._snapshots is not None:
            self._snapshots.pool.pin([each.snapshot_id for each in snapshots])
            session.snapshots = list(snapshots)
            self._unpin_snapshots(old_snapshots)

    def _unpin_snapshots(self, snapshots: Sequence[SnapshotPosition]) -> None:
        if snapshots:
            assert self._snapshots is not None
            self._snapshots.pool.unpin([each.snapshot_id for each in snapshots])

    def _replace_pinned_blocks(self, session: Session, blocks: Sequence[int]) -> None:
        num_same = next(
            (at for at, pair in enumerate(zip(session.blocks, blocks, strict=False)) if pair[0] != pair[1]), None
        )
        num_same = min(len(session.blocks), len(blocks)) if num_same is None else num_same
        self._pool.pin(blocks[num_same:])
        self._unpin_last_blocks(session, len(session.blocks) - num_same)
        self.counts.kept_sessions += not session.blocks and bool(blocks)
        self._num_listed[session.tenant] += len(blocks) - num_same
        session.blocks += blocks[num_same:]

    def _unpin_last_blocks(self, session: Session, count: int) -> None:
        if count:
            first = max(len(session.blocks) - count, 0)
            dropped_snapshots = [each for each in session.snapshots if each.num_blocks > first]
            if dropped_snapshots and len(dropped_snapshots) == len(session.snapshots):
                first = 0
            session.snapshots = [each for each in session.snapshots if each.num_blocks <= first]
            self._unpin_snapshots(dropped_snapshots)
            self._pool.unpin(session.blocks[first:])
            self._num_listed[session.tenant] -= len(session.blocks) - first
            del session.blocks[first:]
            self.counts.kept_sessions -= not session.blocks
            if not self._num_listed[session.tenant]:
                del self._num_listed[session.tenant]

    def _enforce_limits(self) -> None:
        while (
            excess := max(
                self._pool.num_pinned - self._max_pinned,
                self._num_listed.total() - _MAX_LISTED_RATIO * self._max_pinned,
            )
        ) > 0:
            (tenant, _), now = self._num_listed.most_common(1)[0], self._clock()
            tenant_sessions = (each for each in self._sessions if each.tenant == tenant and each.blocks)
            self._unpin_last_blocks(max(tenant_sessions, key=lambda each: each.overdue_ratio(now)), excess)
        pool = None if self._snapshots is None else self._snapshots.pool
        while pool is not None and pool.num_pinned > int(pool.num_blocks * self._share):
            with_snapshots, now = [each for each in self._sessions if each.snapshots], self._clock()
            held = Counter(each.tenant for each in with_snapshots)
            tenant_sessions = (each for each in with_snapshots if each.tenant == held.most_common(1)[0][0])
            victim = max(tenant_sessions, key=lambda each: each.overdue_ratio(now))
            self._unpin_last_blocks(victim, len(victim.blocks))

    def _unpin_some_blocks(self, count: int) -> None:
        """Unpin blocks until `count` more unpinned blocks are free. The session least likely to continue loses blocks
        first.
        """
        now = self._clock()
        needed = self._pool.num_free_unpinned + count
        enough = needed + min(_EXTRA_UNPINNED, self._pool.num_blocks // 16)
        pinned_sessions = sorted(
            (each for each in self._sessions if each.blocks), key=lambda each: each.overdue_ratio(now)
        )
        while pinned_sessions and self._pool.num_free_unpinned < needed:
            session = pinned_sessions.pop()
            self.counts.sessions_given_up += 1
            while session.blocks and self._pool.num_free_unpinned < enough:  # others may use or pin the blocks
                self._unpin_last_blocks(session, enough - self._pool.num_free_unpinned)

    def _unpin_some_snapshots(self, count: int) -> None:
        assert self._snapshots is not None
        pool, now = self._snapshots.pool, self._clock()
        needed = pool.num_free_unpinned + count
        pinned_sessions = sorted(
            (each for each in self._sessions if each.snapshots), key=lambda each: each.overdue_ratio(now)
        )
        while pinned_sessions and pool.num_free_unpinned < needed:
            self.counts.sessions_given_up += 1
            session = pinned_sessions.pop()
            self._unpin_last_blocks(session, len(session.blocks))

    def _forget_session(self, session: Session) -> None:
        self._unpin_last_blocks(session, len(session.blocks))
        del self._sessions[session]
        self._forget_tail_hash(session)
        if session.key is not None and self._by_key.get(session.key) is session:
            del self._by_key[session.key]

    def _forget_tail_hash(self, session: Session) -> None:
        if self._by_tail.get((session.tenant, session.tail_hash)) is session:
            del self._by_tail[session.tenant, session.tail_hash]


def _session_key(request: Request) -> str | None:
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
