from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from quire.engine.common import clock
from quire.engine.common.executor import BlockMover
from quire.engine.common.scheduler_output import BlockLoadRecord
from quire.engine.core.kv_cache.block_pool import BlockPool
from quire.engine.core.kv_cache.prefix_cache import PrefixCache
from quire.engine.core.kv_offload import KVOffloader
from quire.engine.core.request import Request
from quire.engine.core.stats import TierStats
from quire.engine.tiers.block_and_state_mover import BlockAndStateMover, state_key
from quire.engine.tiers.block_loader import LOAD_TIMEOUT_SECONDS, BlockLoad, BlockLoader, IncomingSnapshot
from quire.engine.tiers.block_writer import BlockWriter, ThreadPoolFactory
from quire.engine.tiers.guarded_tier import GuardedTier
from quire.engine.tiers.load_costs import LoadCosts
from quire.engine.tiers.tier import Tier

TierUsage = Callable[[], tuple[int, int]]
"""Returns (number of blocks, bytes)."""


@dataclass(frozen=True, slots=True)
class TransferOptions:
    store_threads: ThreadPoolFactory = ThreadPoolExecutor
    load_threads: ThreadPoolFactory = ThreadPoolExecutor
    load_timeout: float = LOAD_TIMEOUT_SECONDS


class TieredKVOffloader(KVOffloader):
    def __init__(
        self,
        tiers: Sequence[Tier],
        mover: BlockMover,
        load_costs: LoadCosts,
        usages: Mapping[str, TierUsage] | None = None,
        capacity_text: str = "",
        state_mover: BlockMover | None = None,
        transfer_options: TransferOptions | None = None,
    ) -> None:
        """`tiers`: the nearest one first."""
        self.load_costs = load_costs
        self.capacity_text = capacity_text
        self.load_seconds = 0.0
        self._tiers = tiers
        self._mover = mover if state_mover is None else BlockAndStateMover(mover, state_mover)
        self._snapshot_bytes = 0 if state_mover is None else state_mover.block_bytes
        self._usages = usages or {}
        self._transfer_options = transfer_options or TransferOptions()
        self._writer = BlockWriter(tiers, self._mover, self._transfer_options.store_threads)
        self._loaded_ids: set[str] = set()
        """Requests that have waited for a load. They compute blocks that are still missing, because other requests
        could take loaded blocks repeatedly.
        """
        self._loaded_blocks: list[BlockLoadRecord] = []
        self._load_counts = {tier.name: (0, 0.0) for tier in tiers}
        """(number of loaded blocks, seconds), keyed by tier."""

    def attach_cache(self, pool: BlockPool, prefixes: PrefixCache) -> None:
        self._prefix_cache = prefixes
        self._pool = pool
        self._loads = BlockLoader(
            self._tiers,
            self._mover,
            pool,
            self._writer.promote_block,
            self._snapshot_bytes,
            self._transfer_options.load_threads,
            self._transfer_options.load_timeout,
        )
        pool.before_reuse = self._writer.copy_before_reuse
        if prefixes.snapshots is not None:
            prefixes.snapshots.set_before_reuse(self._writer.copy_before_reuse)

    @property
    def has_open_loads(self) -> bool:
        return self._loads.has_open_loads

    @property
    def num_blocks_not_stored(self) -> int:
        return self._writer.num_not_stored

    def offload_blocks_before_free(self, request: Request) -> None:
        self._loaded_ids.discard(request.engine_request.id)
        snapshots = self._prefix_cache.snapshots
        slots = (
            {} if snapshots is None else {digest: slot for slot, digest in snapshots.request_prefix_snapshots(request)}
        )
        blocks = list[tuple[int, bytes]]()
        for block, digest in self._prefix_cache.cached_blocks_with_hashes(
            request
        ):  # a snapshot counts as used after its block
            blocks += [(slots[digest], state_key(digest))] if digest in slots else []
            blocks.append((block, digest))
        self._writer.write_blocks(blocks)

    def try_begin_load(self, request: Request, cached: list[int]) -> bool:
        if request.engine_request.id in self._loaded_ids:
            return False
        block_hashes, on_device = self._prefix_cache.hashes_of_full_blocks(request), cached
        if self._prefix_cache.snapshots is not None:  # the device may have blocks without a snapshot
            on_device = self._pool.get_cached_prefix([hashes[-1] for hashes in block_hashes])
        missing = block_hashes[len(on_device) :]
        if missing and self._loads.join_load(request, missing[0][-1]):
            return True
        tier_names = []
        for hashes in missing:
            tier = next((tier.name for tier in self._tiers if tier.lookup(hashes[-1])), None)
            if tier is None:
                break
            tier_names.append(tier)
        end = len(on_device) + (self.load_costs.num_blocks_worth_loading(tier_names) if tier_names else 0)
        snapshot, count = self._choose_snapshot_and_num_blocks(
            [hashes[-1] for hashes in block_hashes[len(cached) : end]]
        )
        if not count:
            return False
        end = len(cached) + count
        num_new = max(end - len(on_device), 0)
        self._loads.begin_load(
            request, on_device[:end], missing[:num_new], tier_names[:num_new], self._writer.generation, snapshot
        )
        self._loaded_ids.add(request.engine_request.id)
        return True

    def _choose_snapshot_and_num_blocks(self, digests: Sequence[bytes]) -> tuple[IncomingSnapshot | None, int]:
        """Return a snapshot to load, with its slot reserved, if any, and how many leading blocks to use. If the model
        needs snapshots, the last block has one.
        """
        snapshots = self._prefix_cache.snapshots
        if snapshots is None:
            return None, len(digests)
        for count in range(len(digests), 0, -1):
            if snapshots.can_resume_after_block(digest := digests[count - 1]):
                return None, count
            if any(tier.lookup(state_key(digest)) for tier in self._tiers):
                slot = snapshots.reserve_slot_for_load()
                return (None, 0) if slot is None else (IncomingSnapshot(slot, digest), count)
        return None, 0

    def take_loaded_requests(self) -> Sequence[Request]:
        if not self._loads.has_loads:
            return ()
        now, ready = clock.monotonic(), list[Request]()
        finished, timed_out = self._loads.take_finished_and_overdue_loads(now)
        for load, requests in timed_out:
            if load.tiers:
                self.load_costs.record_load(
                    load.tiers[min(load.num_filled, len(load.tiers) - 1)], 1, now - load.began_at
                )
            self.load_seconds += len(requests) * (now - load.began_at)
            self._loaded_ids |= {each.engine_request.id for each in requests}
            ready += requests
        for load in finished:
            self._record_load(load)
            if load.generation == self._writer.generation:
                for block, hashes in zip(load.blocks[: load.num_filled], load.digests, strict=False):
                    for digest in hashes:
                        self._pool.cache_block(block, digest)
            if load.snapshot is not None:
                assert self._prefix_cache.snapshots is not None
                is_complete = load.has_snapshot and load.generation == self._writer.generation
                self._prefix_cache.snapshots.finish_load(*load.snapshot, is_complete=is_complete)
            if load.num_filled < len(load.blocks) or (load.snapshot is not None and not load.has_snapshot):
                self._loaded_ids |= {request.engine_request.id for request in load.waiting}
            ready += load.waiting
            self._loads.release_load(load)
        return ready

    def _record_load(self, load: BlockLoad) -> None:
        block_size = self._prefix_cache.block_size
        for tier, (num_blocks, seconds) in load.loads_by_tier.items():
            counted = self._load_counts[tier]
            self._load_counts[tier] = (counted[0] + num_blocks, counted[1] + seconds)
            self.load_costs.record_load(tier, num_blocks, seconds)
            for request in load.waiting:
                self._loaded_blocks.append(
                    BlockLoadRecord(
                        request.engine_request.id, tier, num_blocks * block_size, load.began_at, load.ended_at
                    )
                )
        self.load_seconds += len(load.waiting) * (load.ended_at - load.began_at)

    def cancel_load(self, request: Request) -> None:
        self._loaded_ids.discard(request.engine_request.id)
        self._loads.remove_request(request)

    def wait_for_loads(self) -> None:
        self._loads.wait_for_load()

    def take_load_records(self) -> list[BlockLoadRecord]:
        loaded_blocks, self._loaded_blocks = self._loaded_blocks, []
        return loaded_blocks

    def record_step_cost(self, tokens: int, seconds: float) -> None:
        self.load_costs.record_compute(tokens, seconds)

    def clear_tiers(self) -> None:
        self._writer.discard_queued_and_stored_blocks()

    def tier_stats(self) -> list[TierStats]:
        all_stats = []
        for tier in self._tiers:
            num_loaded, seconds = self._load_counts[tier.name]
            num_stored = self._writer.num_stored[tier.name]
            block_size = self._prefix_cache.block_size
            block_bytes = self._mover.block_bytes
            usage = self._usages[tier.name]() if tier.name in self._usages else (0, 0)
            is_disabled = isinstance(tier, GuardedTier) and tier.is_disabled
            all_stats.append(
                TierStats(
                    tier.name,
                    *usage,
                    num_loaded,
                    num_loaded * block_size,
                    num_loaded * block_bytes,
                    seconds,
                    num_stored,
                    num_stored * block_bytes,
                    is_disabled,
                )
            )
        return all_stats

    def close_tiers(self) -> None:
        self._loads.shut_down()
        self._writer.flush_and_stop()
        for tier in self._tiers:
            if isinstance(tier, GuardedTier):
                tier.disable_and_stop_threads()
