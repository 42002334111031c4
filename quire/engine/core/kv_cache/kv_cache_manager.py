"""The KV cache of all requests, like vLLM's class of this name, except:

- Groups share one interleaved table, Request.block_ids.
- `use_computed_blocks` takes references to the blocks that `get_computed_blocks` found, and sets the request's table.
  In vLLM allocate_slots does this. The step is separate because blocks may first be loaded from a tier.
- `allocate_slots` takes the request's total number of tokens, not the number of new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.engine.checkpoint.kv_cache_groups import KVBlockNeeds
from quire.engine.common.scheduler_output import BlockCopy, SlotCopy
from quire.engine.core.kv_cache.block_pool import BlockPool
from quire.engine.core.kv_cache.block_tables import BlockTables, without_null_blocks
from quire.engine.core.kv_cache.prefix_cache import PrefixCache
from quire.engine.core.kv_cache.prefix_cache_events import PrefixCacheEvents
from quire.engine.core.kv_cache.state_snapshots import StateSnapshots
from quire.engine.core.request import Request
from quire.engine.core.scheduler_config import SchedulerConfig
from quire.engine.core.stats import LiveCounters
from quire.engine.processes.kv_events import KVEventPublisher


class KVCacheManager:
    def __init__(self, config: SchedulerConfig, counts: LiveCounters) -> None:
        self.block_pool = BlockPool(config.num_blocks)
        self._needs = KVBlockNeeds(config.windows, config.block_size, config.max_chunk_tokens)
        self._block_tables = BlockTables(self.block_pool, self._needs)
        self._snapshots = (
            None
            if config.snapshots is None
            else StateSnapshots(self.block_pool, config.block_size, config.snapshots, config.max_num_seqs + 1)
        )
        """None if the model has all its state in blocks."""
        self.prefix_cache = PrefixCache(
            self._block_tables,
            config.hash_block_size or config.block_size,
            counts,
            enabled=config.enable_prefix_caching,
            snapshots=self._snapshots,
        )

        self._event_publisher: KVEventPublisher | None = None

    @property
    def num_groups(self) -> int:
        return self._block_tables.num_groups

    def num_tokens_fitting_empty_cache(self, num_tokens: int) -> int:
        if self._needs.max_blocks(num_tokens) <= self.block_pool.num_blocks:
            return num_tokens
        return self._needs.max_context_tokens(self.block_pool.num_blocks, num_tokens)

    def begin_step(self) -> None:
        """Call before anything of a step is scheduled."""
        self.prefix_cache.reset_writes_and_unpin_expired()
        if self._snapshots is not None:
            self._snapshots.publish_snapshots()

    def get_computed_blocks(self, request: Request) -> list[int]:
        """Excludes the request's last token, which must be computed."""
        digests = [hashes[-1] for hashes in self.prefix_cache.hashes_of_full_blocks(request)]
        blocks = self._block_tables.find_cached_blocks(digests)
        if self._snapshots is None:
            return blocks
        num_found = len(blocks) // self._block_tables.num_groups
        num_usable = self._snapshots.num_usable_blocks(digests[:num_found])
        if num_usable == num_found:
            return blocks
        return self._block_tables.find_cached_blocks(digests[:num_usable])

    def num_lacking_blocks(self, request: Request, computed: Sequence[int]) -> int:
        """Negative if more blocks are free than needed."""
        return self._block_tables.num_free_blocks_needed(request, computed) - self.block_pool.num_free

    def num_exclusive_blocks(self, request: Request) -> int:
        ref_counts = self.block_pool.ref_counts
        return sum(ref_counts[block] == 1 for block in without_null_blocks(request.block_ids))

    def use_computed_blocks(self, request: Request, computed: list[int]) -> list[BlockCopy]:
        self._block_tables.set_cached_blocks(request, computed)
        self.prefix_cache.set_num_cached_hashes(request, len(computed) // self._block_tables.num_groups)
        if self._snapshots is not None:
            self._snapshots.restore_state(request)
        copies = self.prefix_cache.prepare_partial_block_copies(request)
        self._block_tables.free_behind_window(request)
        self.prefix_cache.count_hits_and_resume_session(request)
        return copies

    def allocate_slots(self, request: Request, num_tokens: int) -> bool:
        """Returns False, with nothing allocated, if too few blocks are free."""
        if self._block_tables.windowed_groups:
            self._block_tables.free_behind_window(request)
        num_missing = self._block_tables.num_missing_blocks(request, num_tokens)
        if num_missing > self.block_pool.num_free:
            return False
        if num_missing > 0:
            request.block_ids += self.block_pool.allocate(num_missing)
        return True

    def limit_tokens_to_snapshot(self, request: Request, max_tokens: int) -> int:
        return max_tokens if self._snapshots is None else self._snapshots.limit_step_tokens(request, max_tokens)

    def limit_draft_tokens(self, request: Request, max_drafts: int) -> int:
        num_known = len(request.token_ids)
        max_drafts = min(max_drafts, self._block_tables.num_tokens_with_room(request) - num_known)
        return max_drafts if self._snapshots is None else self._snapshots.limit_draft_tokens(num_known, max_drafts)

    def cache_blocks(self, request: Request, start: int, num_known: int) -> None:
        """Tokens after the first `num_known` are drafts."""
        if not self.prefix_cache.is_enabled or request.num_computed_tokens == start:
            return
        if self._snapshots is not None:
            self._snapshots.save_state(request, num_known)
        self.prefix_cache.cache_blocks(request, start)

    def ref_copy_sources(self, copies: Sequence[BlockCopy]) -> None:
        """Otherwise a load might overwrite a source before it is copied."""
        self.block_pool.ref(copy.source for copy in copies)

    def unref_copy_sources(self, copies: Sequence[BlockCopy]) -> None:
        self.block_pool.unref([copy.source for copy in copies])

    def take_slot_copies(self) -> list[SlotCopy]:
        """Copies to make, in order, before the step that is being scheduled."""
        return [] if self._snapshots is None else self._snapshots.take_slot_copies()

    def free(self, request: Request) -> None:
        """The blocks may stay pinned for the conversation's next turn."""
        self.prefix_cache.pause_session(request)
        self._block_tables.free_blocks(request)

    def start_publishing_events(self, publisher: KVEventPublisher) -> None:
        """Call before anything is cached."""
        self._event_publisher = publisher
        events = self.prefix_cache.events = PrefixCacheEvents(self.prefix_cache.hash_block_size)
        self.block_pool.after_eviction = events.record_removed
        events.record_cleared()  # the blocks of an earlier engine are gone
        self.publish_events()

    def publish_events(self) -> None:
        if self._event_publisher is not None and self.prefix_cache.events is not None:
            self._event_publisher.publish(self.prefix_cache.events.drain_events())

    def stop_publishing_events(self) -> None:
        if self._event_publisher is not None:
            self._event_publisher.close()

    def reset_prefix_cache(self) -> None:
        self.prefix_cache.clear_sessions()
        self.block_pool.clear_hashes()
        if self.prefix_cache.events is not None:
            self.prefix_cache.events.record_cleared()
        if self._snapshots is not None:
            self._snapshots.clear_snapshots()

    def make_stats(self) -> dict[str, Any]:
        return {
            "used_blocks": self.block_pool.num_used,
            "total_blocks": self.block_pool.num_blocks,
            "cached_blocks": len(self.block_pool.cached_blocks),
            "saved_blocks": self._block_tables.num_blocks_saved,
            "prefix_unit": self.prefix_cache.match_unit,
            "kept_blocks": self.block_pool.num_pinned,
            "cache_tokens": self._block_tables.pool_capacity_tokens,
        }
