"""KV blocks: their reference counts, and the prefix cache's map from hashes to blocks.

A block larger than `hash_block_size` can also be found by the hashes of its beginnings. Free blocks keep their content
until they are reallocated: first blocks without hashes, then the least recently freed blocks, and pinned blocks last.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

NULL_BLOCK = -1
"""Replaces the id of a block that left the attention window."""


def block_hash_with_group_id(digest: bytes, group: int) -> bytes:
    return digest + bytes((group,)) if group else digest


class BlockPool:
    """Ids are 0 to num_blocks - 1. Not thread-safe, because only one scheduler uses it."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.ref_counts = array("i", [0]) * num_blocks
        """NumPy reads this array."""
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._pin_counts: dict[int, int] = {}
        self._free_pinned: set[int] = set()
        self.unpin_some: Callable[[int], None] | None = None
        self._block_hashes: dict[int, list[bytes]] = {}
        self._block_by_hash: dict[bytes, int] = {}
        self.after_eviction: Callable[[Sequence[bytes]], None] | None = None
        """Called with the hashes of an evicted block."""
        self.before_reuse: Callable[[Sequence[int]], None] | None = None
        """Called with the ids of blocks that are about to be overwritten."""

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._free_pinned)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_free_unpinned(self) -> int:
        """Unpinned free blocks are allocated before pinned ones."""
        return len(self._free)

    @property
    def num_pinned(self) -> int:
        return len(self._pin_counts)

    def is_pinned(self, block: int) -> bool:
        return block in self._pin_counts

    @property
    def cached_blocks(self) -> Collection[int]:
        return self._block_hashes.keys()

    def allocate(self, count: int) -> list[int]:
        """Return blocks with undefined content. The caller must check `num_free` before."""
        assert count <= self.num_free, "allocation beyond the pool"
        if count > len(self._free):
            assert self.unpin_some is not None
            self.unpin_some(count - len(self._free))
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._evict_hashes(block)
            self.ref_counts[block] = 1
            blocks.append(block)
        if self.before_reuse is not None:
            self.before_reuse(blocks)
        return blocks

    def has_hash(self, digest: bytes) -> bool:
        return digest in self._block_by_hash

    def get_cached_block(self, digest: bytes) -> int | None:
        """Takes no reference."""
        return self._block_by_hash.get(digest)

    def get_cached_prefix(self, digests: Iterable[bytes]) -> list[int]:
        """Takes no references."""
        blocks = []
        for digest in digests:
            block = self._block_by_hash.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_unreferenced_among(self, blocks: Iterable[int]) -> int:
        return sum(self.ref_counts[block] == 0 for block in blocks)

    def ref(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self.ref_counts[block] == 0:
                if block in self._pin_counts:
                    self._free_pinned.remove(block)
                else:
                    del self._free[block]
            self.ref_counts[block] += 1

    def pin(self, blocks: Iterable[int]) -> None:
        """Each block must have a reference or a hash."""
        for block in blocks:
            if block not in self._pin_counts and self.ref_counts[block] == 0:
                del self._free[block]
                self._free_pinned.add(block)
            self._pin_counts[block] = self._pin_counts.get(block, 0) + 1

    def unpin(self, blocks: Iterable[int]) -> None:
        """Free blocks without other pins are allocated next, the last one of them first."""
        for block in blocks:
            self._pin_counts[block] -= 1
            if not self._pin_counts[block]:
                del self._pin_counts[block]
                if self.ref_counts[block] == 0:
                    self._free_pinned.remove(block)
                    self._free[block] = None
                    self._free.move_to_end(block, last=False)

    def cache_block(self, block: int, digest: bytes) -> bool:
        """Return False if another block already has the hash. Lookups then continue to find that block."""
        assert self.ref_counts[block] > 0, "registering a block that has no owner"
        if digest in self._block_by_hash:
            return False
        self._block_by_hash[digest] = block
        self._block_hashes.setdefault(block, []).append(digest)
        return True

    def unref(self, blocks: Sequence[int]) -> None:
        """Blocks at the end of a prefix are reused before those at its beginning."""
        for block in reversed(blocks):
            self.ref_counts[block] -= 1
            assert self.ref_counts[block] >= 0, f"block {block} was released twice"
            if self.ref_counts[block] == 0 and block in self._pin_counts:
                self._free_pinned.add(block)
            elif self.ref_counts[block] == 0:
                self._free[block] = None
                if block not in self._block_hashes:
                    self._free.move_to_end(block, last=False)

    def evict(self, block: int) -> None:
        """Forget the hashes of a free block, which is allocated next."""
        assert self.ref_counts[block] == 0
        assert block not in self._pin_counts
        self._evict_hashes(block)
        self._free.move_to_end(block, last=False)

    def clear_hashes(self) -> None:
        """Blocks in use keep their content."""
        self._block_hashes.clear()
        self._block_by_hash.clear()

    def check_invariants(self) -> None:
        for block, count in enumerate(self.ref_counts):
            assert (count == 0) == (block in self._free or block in self._free_pinned)
            assert (block in self._free_pinned) == (count == 0 and block in self._pin_counts)
            assert not (block in self._free and block in self._free_pinned)
        assert all(count > 0 for count in self._pin_counts.values())
        known = {digest: block for block, digests in self._block_hashes.items() for digest in digests}
        assert known == self._block_by_hash

    def _evict_hashes(self, block: int) -> None:
        digests = self._block_hashes.pop(block, ())
        for digest in digests:
            del self._block_by_hash[digest]
        if digests and self.after_eviction is not None:
            self.after_eviction(digests)
