"""Snapshots of states that are too large for every page (MatrixState in engine/checkpoint/kv_cache_groups.py): whoever
begins behind a cached page needs one that was kept there. A snapshot is a slot that no sequence has: keeping one copies
a sequence's slot to it, using it copies it back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.engine.common.scheduler_output import SlotCopy
from quire.engine.core.block_pool import BlockPool
from quire.engine.core.request import Request

_MIN_SNAPSHOT_TOKENS = 64
"""Tokens computed since a sequence's last snapshot that make one at its prompt's end worth a step of its own."""


class SnapshotConfig(NamedTuple):
    num_slots: int
    interval_tokens: int
    """Tokens, a multiple of a page's."""


class SnapshotPosition(NamedTuple):
    """A snapshot at the end of a sequence's first pages."""

    snapshot_id: int
    num_blocks: int


class _PendingSnapshot(NamedTuple):
    """A snapshot that a step is to take."""

    snapshot: int
    block_hash: bytes
    """Of the page at whose end it stands."""
    slot: int


class StateSnapshots(ABC):
    """Says behind which cached blocks a request can begin, and saves and restores the recurrent state there."""

    interval_tokens: int
    """Tokens in multiples of which snapshots are kept, in addition to those at prompts' ends."""
    is_required: bool
    """True if a request needs a snapshot to begin after a cached block."""
    pool: BlockPool | None
    """Where snapshots can be pinned as blocks can."""

    @abstractmethod
    def num_usable_blocks(self, digests: Sequence[bytes]) -> int:
        """The largest number of first blocks, of those with these hashes, after which a request can begin."""

    @abstractmethod
    def publish_snapshots(self) -> None:
        """Called when another step is scheduled: the snapshots of earlier steps can be used from now on."""

    @abstractmethod
    def limit_step_tokens(self, request: Request, max_tokens: int) -> int:
        """How many of `max_tokens` known tokens a request may compute in the next step."""

    @abstractmethod
    def limit_draft_tokens(self, num_known: int, max_drafts: int) -> int:
        """How many of `max_drafts` draft tokens may follow a request's `num_known` tokens in the next step."""

    @abstractmethod
    def restore_state(self, request: Request) -> None:
        """Restore the state of a request that got a slot and the blocks of its first `num_computed_tokens` tokens."""

    @abstractmethod
    def save_state(self, request: Request, num_known: int) -> None:
        """Save the state if needed: a step computes the first `num_known` tokens, none of them a draft."""

    @abstractmethod
    def take_slot_copies(self) -> list[SlotCopy]:
        """The copies to make, in this order, before the step that is being scheduled computes anything."""

    @abstractmethod
    def clear_snapshots(self) -> None:
        """Let no snapshot be found."""

    @abstractmethod
    def set_before_reuse(self, before_reuse: Callable[[Sequence[int]], None]) -> None:
        """`before_reuse`: called with slots that are about to be overwritten, as ~slot."""

    @abstractmethod
    def can_resume_after_block(self, digest: bytes) -> bool:
        """True if a request can begin at the end of the block with this hash."""

    @abstractmethod
    def request_prefix_snapshots(self, request: Request) -> list[tuple[int, bytes]]:
        """The snapshots at the ends of a request's blocks: their slots, as ~slot, and the blocks' hashes."""

    @abstractmethod
    def snapshots_for_next_turn(self, request: Request, num_blocks: int) -> list[SnapshotPosition]:
        """The snapshots among the first `num_blocks` blocks with which a conversation's next turn may begin: the last
        one, and the last one within the prompt, because a template may write an answer differently later."""

    @abstractmethod
    def reserve_slot_for_load(self) -> int | None:
        """A slot for a snapshot from a tier, until `finish_load`; None if there is none now."""

    @abstractmethod
    def finish_load(self, slot: int, digest: bytes, *, is_complete: bool) -> None:
        """The load of a snapshot has ended, or failed if not `is_complete`. `digest`: its block's hash."""


class NullStateSnapshots(StateSnapshots):
    """For models whose blocks hold everything that a request needs."""

    interval_tokens = 0
    is_required = False
    pool = None

    def num_usable_blocks(self, digests: Sequence[bytes]) -> int:
        return len(digests)

    def publish_snapshots(self) -> None:
        pass

    def limit_step_tokens(self, request: Request, max_tokens: int) -> int:
        return max_tokens

    def limit_draft_tokens(self, num_known: int, max_drafts: int) -> int:
        return max_drafts

    def restore_state(self, request: Request) -> None:
        pass

    def save_state(self, request: Request, num_known: int) -> None:
        pass

    def take_slot_copies(self) -> list[SlotCopy]:
        return []

    def clear_snapshots(self) -> None:
        pass

    def set_before_reuse(self, before_reuse: Callable[[Sequence[int]], None]) -> None:
        pass

    def can_resume_after_block(self, digest: bytes) -> bool:
        return True

    def request_prefix_snapshots(self, request: Request) -> list[tuple[int, bytes]]:
        return []

    def snapshots_for_next_turn(self, request: Request, num_blocks: int) -> list[SnapshotPosition]:
        return []

    def reserve_slot_for_load(self) -> int | None:
        return None

    def finish_load(self, slot: int, digest: bytes, *, is_complete: bool) -> None:
        pass


class PooledStateSnapshots(StateSnapshots):
    """They are kept at every so many tokens, counted from a sequence's beginning, and at the last page's end within its
    prompt, so that a conversation's next turn finds one. Steps end there. The least recently used ones make room; those
    whose page is cached no longer go first."""

    is_required = True

    def __init__(self, block_pool: BlockPool, block_size: int, plan: SnapshotConfig, first_slot: int) -> None:
        """The snapshots are the slots from `first_slot` on."""
        assert plan.interval_tokens % block_size == 0
        self._block_pool = block_pool
        self._block_size = block_size
        self.interval_tokens = plan.interval_tokens
        self._first_slot = first_slot
        self.pool = self._pool = BlockPool(plan.num_slots)
        self._snapshot_hashes: dict[int, bytes] = {}
        self._slot_copies: list[SlotCopy] = []
        self._pending: list[_PendingSnapshot] = []
        """By the step that was decided last: it has to compute them first."""

    def num_usable_blocks(self, digests: Sequence[bytes]) -> int:
        return next((count for count in range(len(digests), 0, -1) if self._pool.has_hash(digests[count - 1])), 0)

    def publish_snapshots(self) -> None:
        for snapshot, digest, slot in self._pending:
            self._pool.cache_block(snapshot, digest)
            self._pool.unref([snapshot])
            self._snapshot_hashes[snapshot] = digest
            self._slot_copies.append(SlotCopy(slot, self._first_slot + snapshot))
        self._pending = []

    def limit_step_tokens(self, request: Request, max_tokens: int) -> int:
        return min(max_tokens, self._next_snapshot_end(request) - request.num_computed_tokens)

    def limit_draft_tokens(self, num_known: int, max_drafts: int) -> int:
        """The next step must be able to end at the next place."""
        return min(max_drafts, self._next_interval_end(num_known) - num_known - 1)

    def restore_state(self, request: Request) -> None:
        assert request.slot is not None
        request.num_snapshot_tokens = request.num_computed_tokens
        if request.num_computed_tokens:
            snapshot = self._pool.get_cached_block(self._block_hash(request, request.num_computed_tokens))
            assert snapshot is not None, "a sequence begins where no snapshot is"
            self._pool.ref([snapshot])
            self._pool.unref([snapshot])  # now it is the most recently used one
            self._slot_copies.append(SlotCopy(self._first_slot + snapshot, request.slot))

    def save_state(self, request: Request, num_known: int) -> None:
        is_snapshot_end = num_known % self.interval_tokens == 0 or num_known == self._prompt_snapshot_end(request)
        if not is_snapshot_end or num_known > len(request.token_ids):
            return
        assert request.slot is not None
        request.num_snapshot_tokens, digest = num_known, self._block_hash(request, num_known)
        if self._pool.has_hash(digest):
            return
        self._evict_stale()
        if self._pool.num_free:
            (snapshot,) = self._pool.allocate(1)
            self._snapshot_hashes.pop(snapshot, None)
            self._pending.append(_PendingSnapshot(snapshot, digest, request.slot))

    def take_slot_copies(self) -> list[SlotCopy]:
        copies, self._slot_copies = self._slot_copies, []
        return copies

    def clear_snapshots(self) -> None:
        self._pool.clear_hashes()
        self._snapshot_hashes.clear()
        self._pool.unref([each.snapshot for each in self._pending])
        self._pending = []

    def set_before_reuse(self, before_reuse: Callable[[Sequence[int]], None]) -> None:
        self._pool.before_reuse = lambda snapshots: before_reuse([~(self._first_slot + each) for each in snapshots])

    def can_resume_after_block(self, digest: bytes) -> bool:
        return self._pool.has_hash(digest)

    def request_prefix_snapshots(self, request: Request) -> list[tuple[int, bytes]]:
        """Those that a copy fills only when the next step begins are left out: they are kept with the next sequence."""
        filling, slots = {copy.target for copy in self._slot_copies}, []
        for digest in request.block_hashes(
            min(request.num_computed_tokens, len(request.token_ids)) // self._block_size, self._block_size
        ):
            snapshot = self._pool.get_cached_block(digest)
            if snapshot is not None and (slot := self._first_slot + snapshot) not in filling:
                slots.append((~slot, digest))
        return slots

    def snapshots_for_next_turn(self, request: Request, num_blocks: int) -> list[SnapshotPosition]:
        full = min(request.num_computed_tokens, len(request.token_ids)) // self._block_size
        digests, positions = request.block_hashes(full, self._block_size)[:num_blocks], list[SnapshotPosition]()
        for max_blocks in (len(digests), (request.num_prompt_tokens - 1) // self._block_size):
            if count := self.num_usable_blocks(digests[:max_blocks]):
                snapshot = self._pool.get_cached_block(digests[count - 1])
                assert snapshot is not None
                positions.append(SnapshotPosition(snapshot, count))
        return list(dict.fromkeys(positions))

    def reserve_slot_for_load(self) -> int | None:
        self._evict_stale()
        if not self._pool.num_free:
            return None
        (snapshot,) = self._pool.allocate(1)
        digest, slot = self._snapshot_hashes.pop(snapshot, None), self._first_slot + snapshot
        if any(slot in (copy.source, copy.target) for copy in self._slot_copies):  # which the next step makes
            if digest is not None:  # it stays what it is: the sequence that asks may be about to begin there
                self._pool.cache_block(snapshot, digest)
                self._snapshot_hashes[snapshot] = digest
            self._pool.unref([snapshot])
            return None
        return slot

    def finish_load(self, slot: int, digest: bytes, *, is_complete: bool) -> None:
        snapshot = slot - self._first_slot
        if is_complete:
            self._pool.cache_block(snapshot, digest)
            self._snapshot_hashes[snapshot] = digest
        self._pool.unref([snapshot])

    def _next_snapshot_end(self, request: Request) -> int:
        """The first place behind a sequence's computed tokens."""
        regular, end = self._next_interval_end(request.num_computed_tokens), self._prompt_snapshot_end(request)
        return end if end is not None and request.num_computed_tokens < end < regular else regular

    def _next_interval_end(self, tokens: int) -> int:
        return (tokens // self.interval_tokens + 1) * self.interval_tokens

    def _prompt_snapshot_end(self, request: Request) -> int | None:
        """The last page's end within the prompt, whose last token must be computed in any case; None where too little
        is computed up to there."""
        end = (request.num_prompt_tokens - 1) // self._block_size * self._block_size
        return end if end - request.num_snapshot_tokens >= _MIN_SNAPSHOT_TOKENS else None

    def _block_hash(self, request: Request, tokens: int) -> bytes:
        """Of the page at whose end so many tokens are."""
        return request.block_hashes(tokens // self._block_size, self._block_size)[-1]

    def _evict_stale(self) -> None:
        """Of snapshots whose page is cached no longer."""
        for snapshot, digest in list(self._snapshot_hashes.items()):
            if not self._block_pool.has_hash(digest) and not self._pool.is_pinned(snapshot):
                self._pool.evict(snapshot)
                del self._snapshot_hashes[snapshot]


def make_state_snapshots(
    block_pool: BlockPool, block_size: int, plan: SnapshotConfig | None, first_slot: int
) -> StateSnapshots:
    if plan is None:
        return NullStateSnapshots()
    return PooledStateSnapshots(block_pool, block_size, plan, first_slot)
