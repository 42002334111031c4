from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.engine.checkpoint.kv_cache_groups import KVBlockNeeds
from quire.engine.core.kv_cache.block_pool import NULL_BLOCK, BlockPool, block_hash_with_group_id
from quire.engine.core.request import Request


class BlockTables:
    """Request.block_ids interleaves KV cache groups: for every block_size tokens, it has one block of each group."""

    def __init__(self, pool: BlockPool, needs: KVBlockNeeds) -> None:
        self.pool = pool
        self.needs = needs
        self.num_groups = len(needs.windows)
        self.num_blocks_saved = 0
        """Blocks that the current requests would need in addition if there were no windows."""
        self._block_size = needs.block_size
        self._full_groups = [group for group, window in enumerate(needs.windows) if window is None]
        self.windowed_groups = [(group, window) for group, window in enumerate(needs.windows) if window is not None]

    @property
    def pool_capacity_tokens(self) -> int:
        return self.pool.num_blocks // self.num_groups * self._block_size

    def num_missing_blocks(self, request: Request, tokens: int) -> int:
        return self.num_groups * -(-tokens // self._block_size) - len(request.block_ids)

    def num_free_blocks_needed(self, request: Request, cached: Sequence[int]) -> int:
        """Blocks that leave a window are reused."""
        tokens = len(request.token_ids)
        num_to_allocate = self.needs.max_blocks(
            tokens, len(cached) // self.num_groups
        ) + self.pool.count_unreferenced_among(without_null_blocks(cached))
        return min(num_to_allocate, self.needs.max_blocks(tokens))

    def num_tokens_with_room(self, request: Request) -> int:
        return (len(request.block_ids) + self.pool.num_free) // self.num_groups * self._block_size

    def free_behind_window(self, request: Request) -> None:
        """A step in flight may still read the freed blocks, but their next owner writes later. Rejecting drafts never
        leads back before the first token of the drafts' step.
        """
        for group, window in self.windowed_groups:
            first, last = (
                self.needs.first_visible_block(window, at)
                for at in (request.num_trimmed_tokens, request.num_computed_tokens)
            )
            if first < last:
                block_slice = slice(first * self.num_groups + group, last * self.num_groups, self.num_groups)
                self.pool.unref(request.block_ids[block_slice])
                request.block_ids[block_slice] = [NULL_BLOCK] * (last - first)
                self.num_blocks_saved += last - first
        request.num_trimmed_tokens = request.num_computed_tokens

    def set_cached_blocks(self, request: Request, cached: Sequence[int]) -> None:
        """The request must have no blocks."""
        self.pool.ref(without_null_blocks(cached))
        request.block_ids = list(cached)
        request.num_computed_tokens = request.num_trimmed_tokens = len(cached) // self.num_groups * self._block_size
        self.num_blocks_saved += cached.count(NULL_BLOCK)

    def free_blocks(self, request: Request) -> None:
        self.num_blocks_saved -= request.block_ids.count(NULL_BLOCK)
        self.pool.unref(without_null_blocks(request.block_ids))
        request.block_ids = []

    def find_cached_blocks(self, digests: Sequence[bytes]) -> list[int]:
        """Return the longest cached prefix, with NULL_BLOCK for blocks outside the next token's window."""
        tables: list[list[int]] = [[] for _ in self.needs.windows]
        for group in self._full_groups:
            tables[group] = self.pool.get_cached_prefix(block_hash_with_group_id(digest, group) for digest in digests)
            digests = digests[: len(tables[group])]
        shortened = bool(self.windowed_groups)
        while shortened:
            before = len(digests)
            for group, window in self.windowed_groups:
                tables[group] = self._find_in_window(digests, group, window)
                digests = digests[: len(tables[group])]
            shortened = len(digests) < before
        if self.num_groups == 1:
            return tables[0]
        return [block for row in zip(*(table[: len(digests)] for table in tables), strict=True) for block in row]

    def _find_in_window(self, digests: Sequence[bytes], group: int, window: int) -> list[int]:
        """Search backwards from the end. If a block is missing, the prefix ends before it."""
        count, blocks = len(digests), [NULL_BLOCK] * len(digests)
        index = count - 1
        while index >= self.needs.first_visible_block(window, count * self._block_size):
            block = self.pool.get_cached_block(block_hash_with_group_id(digests[index], group))
            if block is None:
                count = index
            else:
                blocks[index] = block
            index -= 1
        return blocks[:count]


def without_null_blocks(blocks: Iterable[int]) -> list[int]:
    return [block for block in blocks if block != NULL_BLOCK]
