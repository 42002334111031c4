from __future__ import annotations

from collections.abc import Sequence

from quire.engine.common.scheduler_output import BlockCopy
from quire.engine.core.kv_cache.block_pool import NULL_BLOCK, block_hash_with_group_id
from quire.engine.core.kv_cache.block_tables import BlockTables, without_null_blocks
from quire.engine.core.kv_cache.pinned_sessions import PinnedSessions
from quire.engine.core.kv_cache.prefix_cache_events import PrefixCacheEvents
from quire.engine.core.kv_cache.state_snapshots import StateSnapshots
from quire.engine.core.request import Request
from quire.engine.core.stats import LiveCounters


class PrefixCache:
    def __init__(
        self,
        tables: BlockTables,
        hash_block_size: int,
        counts: LiveCounters,
        *,
        enabled: bool,
        snapshots: StateSnapshots | None,
    ) -> None:
        """`hash_block_size`: number of tokens for each hash, a divisor of the block size."""
        self.block_size = block_size = tables.needs.block_size
        assert block_size % hash_block_size == 0
        self.is_enabled = enabled
        self.snapshots = snapshots
        self._sessions = PinnedSessions(tables.pool, snapshots=self.snapshots, counts=counts)
        self._counts = counts
        self._pool = tables.pool
        self._num_groups = tables.num_groups
        self.hash_block_size = hash_block_size
        self._hashes_per_block = block_size // hash_block_size
        self.events: PrefixCacheEvents | None = None
        self._first_written: dict[int, int] = {}
        """Keyed by the blocks that the step being scheduled writes: the position within the block of the first token
        written.
        """

    @property
    def match_unit(self) -> int:
        """Cached prefixes have a multiple of this number of tokens; 0 if the cache is off."""
        if not self.is_enabled:
            return 0
        return max(self.hash_block_size, 0 if self.snapshots is None else self.snapshots.interval_tokens)

    def reset_writes_and_unpin_expired(self) -> None:
        self._first_written.clear()
        self._sessions.unpin_expired()

    def hashes_of_full_blocks(self, request: Request) -> list[Sequence[bytes]]:
        """For each full block, the hashes of its beginnings, then that of the whole block. The last token is excluded,
        because it must be computed.
        """
        if not self.is_enabled or request.skips_prefix_cache_reads:
            return []
        digests = request.block_hashes((len(request.token_ids) - 1) // self.hash_block_size, self.hash_block_size)
        return [
            digests[end - self._hashes_per_block : end]
            for end in range(self._hashes_per_block, len(digests) + 1, self._hashes_per_block)
        ]

    def set_num_cached_hashes(self, request: Request, num_blocks: int) -> None:
        request.num_cached_hashes = num_blocks * self._hashes_per_block

    def count_hits_and_resume_session(self, request: Request) -> None:
        """Does nothing after a preemption."""
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            self._counts.prefix_queries += request.num_prompt_tokens
            self._counts.prefix_hits += request.num_cached_tokens
            if self.is_enabled and request.engine_request.sampling_params is not None:
                self._sessions.record_session_resume(
                    request,
                    request.block_hashes(len(request.token_ids) // self.hash_block_size, self.hash_block_size),
                )

    def pause_session(self, request: Request) -> None:
        if self.is_enabled and request.engine_request.sampling_params is not None:
            blocks = without_null_blocks(
                request.block_ids[: request.num_cached_hashes // self._hashes_per_block * self._num_groups]
            )
            digests = request.block_hashes(request.num_cached_hashes, self.hash_block_size)
            self._sessions.pause_session(
                request, [block for block in blocks if block in self._pool.cached_blocks], digests
            )

    def clear_sessions(self) -> None:
        self._sessions.clear_sessions()

    def prepare_partial_block_copies(self, request: Request) -> list[BlockCopy]:
        """If each group has a cached block that begins like the request's next one, allocate a block per group and
        return the copies to make. Copies run before the step, so what the step writes cannot be copied.
        """
        if self._hashes_per_block == 1 or not self.is_enabled or request.skips_prefix_cache_reads:
            return []
        first = len(request.block_ids) // self._num_groups * self._hashes_per_block
        digests = request.block_hashes((len(request.token_ids) - 1) // self.hash_block_size, self.hash_block_size)[
            first : first + self._hashes_per_block - 1
        ]
        for count in range(len(digests), 0, -1):
            partial_blocks = self._find_partial_blocks(digests[count - 1], count * self.hash_block_size)
            if len(partial_blocks) == self._num_groups:
                # A source block without references may itself be allocated. Then its group needs no copy.
                new_blocks = self._pool.allocate(self._num_groups)
                other_blocks = iter([block for block in new_blocks if block not in partial_blocks])
                blocks = [block if block in new_blocks else next(other_blocks) for block in partial_blocks]
                request.block_ids += blocks
                request.num_computed_tokens += count * self.hash_block_size
                pairs = zip(partial_blocks, blocks, strict=True)
                return [BlockCopy(*pair, count * self.hash_block_size) for pair in pairs if pair[0] != pair[1]]
        return []

    def _find_partial_blocks(self, digest: bytes, tokens: int) -> list[int]:
        candidates = [
            self._pool.get_cached_block(block_hash_with_group_id(digest, group)) for group in range(self._num_groups)
        ]
        return [
            block
            for block in candidates
            if block is not None and tokens <= self._first_written.get(block, self.block_size)
        ]

    def cache_blocks(self, request: Request, start: int) -> None:
        full = min(request.num_computed_tokens, len(request.token_ids)) // self.hash_block_size
        if full > request.num_cached_hashes:
            for index, digest in enumerate(
                request.block_hashes(full, self.hash_block_size)[request.num_cached_hashes :],
                request.num_cached_hashes,
            ):
                first = index // self._hashes_per_block * self._num_groups
                for group, block in enumerate(request.block_ids[first : first + self._num_groups]):
                    if block == NULL_BLOCK:
                        continue
                    is_new = self._pool.cache_block(block, block_hash_with_group_id(digest, group))
                    if is_new and self.events is not None:
                        self.events.record_stored(request, index, digest, group)
            request.num_cached_hashes = full
        if self._hashes_per_block > 1:  # only `prepare_partial_block_copies` needs this
            for index in range(start // self.block_size, -(-request.num_computed_tokens // self.block_size)):
                for block in request.block_ids[index * self._num_groups : (index + 1) * self._num_groups]:
                    self._first_written[block] = max(start - index * self.block_size, 0)

    def cached_blocks_with_hashes(self, request: Request) -> list[tuple[int, bytes]]:
        assert self._num_groups == 1
        count = request.num_cached_hashes // self._hashes_per_block
        digests = request.block_hashes(count * self._hashes_per_block, self.hash_block_size)[
            self._hashes_per_block - 1 :: self._hashes_per_block
        ]
        return [
            (block, digest)
            for block, digest in zip(request.block_ids, digests, strict=False)
            if self._pool.has_hash(digest)
        ]
