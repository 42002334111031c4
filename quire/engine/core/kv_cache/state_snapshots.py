"""Snapshots of recurrent states, which are too large to store for every block. A request can start after a cached block
only if a snapshot was taken there. A snapshot is a slot without a request. Slots are copied to save and restore states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.engine.common.scheduler_output import SlotCopy
from quire.engine.core.kv_cache.block_pool import BlockPool
from quire.engine.core.request import Request

_MIN_SNAPSHOT_TOKENS = 64
"""A step ends near the prompt's end, for a snapshot there, only if the snapshot saves at least this many tokens."""


class SnapshotConfig(NamedTuple):
    num_slots: int
    interval_tokens: int


class SnapshotPosition(NamedTuple):
    snapshot_id: int
    num_blocks: int


class _PendingSnapshot(NamedTuple):
    snapshot: int
    block_hash: bytes
    """Hash of the last block that the snapshot covers."""
    slot: int


class StateSnapshots:
    """Takes snapshots where steps end: every `interval_tokens`, and at the prompt's last block end, where the next turn
    may start. Snapshots whose block is no longer cached are evicted first, then the least recently used ones.
    """

    def __init__(self, block_pool: BlockPool, block_size: int, plan: SnapshotConfig, first_slot: int) -> None:
        """Snapshots are stored in the slots from `first_slot` on."""
        assert plan.interval_tokens % block_size == 0
        self._block_pool = block_pool
        self._block_size = block_size
        self.interval_tokens = plan.interval_tokens
        self._first_slot = first_slot
        self.pool = self._pool = BlockPool(plan.num_slots)
        self._snapshot_hashes: dict[int, bytes] = {}
        self._slot_copies: list[SlotCopy] = []
        self._pending: list[_PendingSnapshot] = []

    def num_usable_blocks(self, digests: Sequence[bytes]) -> int:
        """Number of leading blocks after which a request can start."""
        return next((count for count in range(len(digests), 0, -1) if self._pool.has_hash(digests[count - 1])), 0)

    def publish_snapshots(self) -> None:
        """Make the snapshots of earlier steps usable. Called when the next step is scheduled."""
        for snapshot, digest, slot in self._pending:
            self._pool.cache_block(snapshot, digest)
            self._pool.unref([snapshot])
            self._snapshot_hashes[snapshot] = digest
            self._slot_copies.append(SlotCopy(slot, self._first_slot + snapshot))
        self._pending = []

    def limit_step_tokens(self, request: Request, max_tokens: int) -> int:
        """Limit the known tokens of the next step to those before the next snapshot."""
        return min(max_tokens, self._next_snapshot_end(request) - request.num_computed_tokens)

    def limit_draft_tokens(self, num_known: int, max_drafts: int) -> int:
        """Limit the draft tokens of the next step, so that a later step can end at the next snapshot."""
        return min(max_drafts, self._next_interval_end(num_known) - num_known - 1)

    def restore_state(self, request: Request) -> None:
        """The request must already have its slot and its computed blocks."""
        assert request.slot is not None
        request.num_snapshot_tokens = request.num_computed_tokens
        if request.num_computed_tokens:
            snapshot = self._pool.get_cached_block(self._block_hash(request, request.num_computed_tokens))
            assert snapshot is not None, "a sequence begins where no snapshot is"
            self._pool.ref([snapshot])
            self._pool.unref([snapshot])  # marks it as most recently used
            self._slot_copies.append(SlotCopy(self._first_slot + snapshot, request.slot))

    def save_state(self, request: Request, num_known: int) -> None:
        """`num_known`: tokens computed after the step, without drafts."""
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
        """Copies to make, in order, before the step that is being scheduled."""
        copies, self._slot_copies = self._slot_copies, []
        return copies

    def clear_snapshots(self) -> None:
        self._pool.clear_hashes()
        self._snapshot_hashes.clear()
        self._pool.unref([each.snapshot for each in self._pending])
        self._pending = []

    def set_before_reuse(self, before_reuse: Callable[[Sequence[int]], None]) -> None:
        """The callback gets ~slot for each slot that is about to be overwritten."""
        self._pool.before_reuse = lambda snapshots: before_reuse([~(self._first_slot + each) for each in snapshots])

    def can_resume_after_block(self, digest: bytes) -> bool:
        return self._pool.has_hash(digest)

    def request_prefix_snapshots(self, request: Request) -> list[tuple[int, bytes]]:
        """(~slot, block hash) of the request's snapshots. A snapshot that is filled only when the next step begins is
        left out.
        """
        filling, slots = {copy.target for copy in self._slot_copies}, []
        for digest in request.block_hashes(
            min(request.num_computed_tokens, len(request.token_ids)) // self._block_size, self._block_size
        ):
            snapshot = self._pool.get_cached_block(digest)
            if snapshot is not None and (slot := self._first_slot + snapshot) not in filling:
                slots.append((~slot, digest))
        return slots

    def snapshots_for_next_turn(self, request: Request, num_blocks: int) -> list[SnapshotPosition]:
        """The request's last snapshot, and the last one within the prompt, because a template may render the answer
        differently in the next turn.
        """
        full = min(request.num_computed_tokens, len(request.token_ids)) // self._block_size
        digests, positions = request.block_hashes(full, self._block_size)[:num_blocks], list[SnapshotPosition]()
        for max_blocks in (len(digests), (request.num_prompt_tokens - 1) // self._block_size):
            if count := self.num_usable_blocks(digests[:max_blocks]):
                snapshot = self._pool.get_cached_block(digests[count - 1])
                assert snapshot is not None
                positions.append(SnapshotPosition(snapshot, count))
        return list(dict.fromkeys(positions))

    def reserve_slot_for_load(self) -> int | None:
        """Reserve a slot until `finish_load`. None if no slot is free now."""
        self._evict_stale()
        if not self._pool.num_free:
            return None
        (snapshot,) = self._pool.allocate(1)
        digest, slot = self._snapshot_hashes.pop(snapshot, None), self._first_slot + snapshot
        if any(slot in (copy.source, copy.target) for copy in self._slot_copies):  # the next step copies this slot
            if digest is not None:  # the request may start from this snapshot
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
        regular, end = self._next_interval_end(request.num_computed_tokens), self._prompt_snapshot_end(request)
        return end if end is not None and request.num_computed_tokens < end < regular else regular

    def _next_interval_end(self, tokens: int) -> int:
        return (tokens // self.interval_tokens + 1) * self.interval_tokens

    def _prompt_snapshot_end(self, request: Request) -> int | None:
        """Tokens before the snapshot near the prompt's end; None if the snapshot would save too few."""
        end = (request.num_prompt_tokens - 1) // self._block_size * self._block_size
        return end if end - request.num_snapshot_tokens >= _MIN_SNAPSHOT_TOKENS else None

    def _block_hash(self, request: Request, tokens: int) -> bytes:
        return request.block_hashes(tokens // self._block_size, self._block_size)[-1]

    def _evict_stale(self) -> None:
        for snapshot, digest in list(self._snapshot_hashes.items()):
            if not self._block_pool.has_hash(digest) and not self._pool.is_pinned(snapshot):
                self._pool.evict(snapshot)
                del self._snapshot_hashes[snapshot]
