"""The KV cache of all requests: block pool, block tables, prefix cache and state snapshots behind one door.

It is vLLM's class of this name, and differs from it so:
- All KV cache groups of a request share one interleaved table, Request.block_ids, and blocks are plain ids: there is no
  coordinator and no KVCacheBlocks.
- `get_computed_blocks` takes no reference and allocates nothing, because the blocks may have to be loaded from a tier
  first. `use_computed_blocks` then lets the request start with them; vLLM's allocate_slots does both.
- `allocate_slots` is told the tokens that a request is to have room for, counted from its first one, and not how many
  are new.
- The beginning of a large block may be shared by a copy of it, and recurrent states have snapshots outside the blocks.
- `free` may pin blocks for the next turn of a conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.engine.checkpoint.kv_cache_groups import KVBlockNeeds
from quire.engine.common.scheduler_output import BlockCopy, SlotCopy
from quire.engine.core.block_pool import BlockPool
from quire.engine.core.kv_cache.block_tables import BlockTables, without_null_blocks
from quire.engine.core.kv_cache.prefix_cache import PrefixCache
from quire.engine.core.request import Request
from quire.engine.core.scheduler_config import SchedulerConfig
from quire.engine.core.state_snapshots import make_state_snapshots
from quire.engine.core.stats import LiveCounters


class KVCacheManager:
    def __init__(self, config: SchedulerConfig, counts: LiveCounters) -> None:
        self.block_pool = BlockPool(config.num_blocks)
        self._needs = KVBlockNeeds(config.windows, config.block_size, config.max_chunk_tokens)
        self._block_tables = BlockTables(self.block_pool, self._needs)
        self._snapshots = make_state_snapshots(
            self.block_pool, config.block_size, config.snapshots, config.max_num_seqs + 1
        )
        self.prefix_cache = PrefixCache(
            self._block_tables,
            config.hash_block_size or config.block_size,
            counts,
            enabled=config.enable_prefix_caching,
            snapshots=self._snapshots,
        )

    @property
    def num_groups(self) -> int:
        """KV cache groups, each of which has a block for the same tokens."""
        return self._block_tables.num_groups

    def num_tokens_fitting_empty_cache(self, num_tokens: int) -> int:
        """How many of `num_tokens` tokens one request can have, if it has the whole cache."""
        if self._needs.max_blocks(num_tokens) <= self.block_pool.num_blocks:
            return num_tokens
        return self._needs.max_context_tokens(self.block_pool.num_blocks, num_tokens)

    def begin_step(self) -> None:
        """Called before anything of a step is scheduled."""
        self.prefix_cache.reset_writes_and_unpin_expired()
        self._snapshots.publish_snapshots()

    def get_computed_blocks(self, request: Request) -> list[int]:
        """Cached blocks for a waiting request's tokens but the last, as BlockTables.find_cached_blocks returns them."""
        digests = [hashes[-1] for hashes in self.prefix_cache.hashes_of_full_blocks(request)]
        blocks = self._block_tables.find_cached_blocks(digests)
        num_found = len(blocks) // self._block_tables.num_groups
        num_usable = self._snapshots.num_usable_blocks(digests[:num_found])
        if num_usable == num_found:
            return blocks
        return self._block_tables.find_cached_blocks(digests[:num_usable])

    def num_lacking_blocks(self, request: Request, computed: Sequence[int]) -> int:
        """How many blocks more must be free until a waiting request that starts with the `computed` ones can compute
        all its tokens; 0 or less: it can."""
        return self._block_tables.num_free_blocks_needed(request, computed) - self.block_pool.num_free

    def num_exclusive_blocks(self, request: Request) -> int:
        """Blocks that become free when this request alone frees its blocks."""
        ref_counts = self.block_pool.ref_counts
        return sum(ref_counts[block] == 1 for block in without_null_blocks(request.block_ids))

    def use_computed_blocks(self, request: Request, computed: list[int]) -> list[BlockCopy]:
        """Let a request that has a slot and no blocks start with these. Returns the copies of partial blocks that it
        needs."""
        self._block_tables.set_cached_blocks(request, computed)
        self.prefix_cache.set_num_cached_hashes(request, len(computed) // self._block_tables.num_groups)
        self._snapshots.restore_state(request)
        copies = self.prefix_cache.prepare_partial_block_copies(request)
        self._block_tables.free_behind_window(request)
        self.prefix_cache.count_hits_and_resume_session(request)
        return copies

    def allocate_slots(self, request: Request, num_tokens: int) -> bool:
        """Allocate blocks for a request's first `num_tokens` tokens, and free those that have left a window. False if
        there are too few: then none is allocated."""
        if self._block_tables.windowed_groups:
            self._block_tables.free_behind_window(request)
        num_missing = self._block_tables.num_missing_blocks(request, num_tokens)
        if num_missing > self.block_pool.num_free:
            return False
        if num_missing > 0:
            request.block_ids += self.block_pool.allocate(num_missing)
        return True

    def limit_tokens_to_snapshot(self, request: Request, max_tokens: int) -> int:
        """How many of `max_tokens` known tokens a request may compute in the next step: it may have to end at a
        snapshot."""
        return self._snapshots.limit_step_tokens(request, max_tokens)

    def limit_draft_tokens(self, request: Request, max_drafts: int) -> int:
        """How many of `max_drafts` draft tokens have room after a request's known tokens; may be negative."""
        num_known = len(request.token_ids)
        room = self._block_tables.num_tokens_with_room(request) - num_known
        return min(max_drafts, room, self._snapshots.limit_draft_tokens(num_known, max_drafts))

    def cache_blocks(self, request: Request, start: int, num_known: int) -> None:
        """Let the blocks that are full now be found. The step computes the request's tokens from `start` on; its first
        `num_known` tokens are known, and the rest are drafts."""
        if not self.prefix_cache.is_enabled or request.num_computed_tokens == start:
            return
        self._snapshots.save_state(request, num_known)
        self.prefix_cache.cache_blocks(request, start)

    def ref_copy_sources(self, copies: Sequence[BlockCopy]) -> None:
        """Keep the sources of copies until `unref_copy_sources`: a load might fill a free one before it is copied."""
        self.block_pool.ref(copy.source for copy in copies)

    def unref_copy_sources(self, copies: Sequence[BlockCopy]) -> None:
        self.block_pool.unref([copy.source for copy in copies])

    def take_slot_copies(self) -> list[SlotCopy]:
        """The snapshots to copy before the step that is being scheduled, in this order."""
        return self._snapshots.take_slot_copies()

    def free(self, request: Request) -> None:
        """Free all blocks of a request; some are pinned for the next turn of its conversation."""
        self.prefix_cache.pause_session(request)
        self._block_tables.free_blocks(request)

    def reset_prefix_cache(self) -> None:
        """Forget everything that was computed so far."""
        self.prefix_cache.clear_sessions()
        self.block_pool.clear_hashes()
        self._snapshots.clear_snapshots()

    def make_stats(self) -> dict[str, Any]:
        """The fields of EngineStats that describe the cache."""
        return {
            "used_blocks": self.block_pool.num_used,
            "total_blocks": self.block_pool.num_blocks,
            "cached_blocks": len(self.block_pool.cached_blocks),
            "saved_blocks": self._block_tables.num_blocks_saved,
            "prefix_unit": self.prefix_cache.match_unit,
            "kept_blocks": self.block_pool.num_pinned,
            "cache_tokens": self._block_tables.pool_capacity_tokens,
        }
