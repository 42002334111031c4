"""Copies KV blocks to tiers in a thread. Copying begins when a request's blocks are freed. Blocks that are reused
before they are copied are copied at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from threading import Lock

from quire.engine.common.executor import BlockMover
from quire.engine.tiers.tier import BlockContent, Tier

_MAX_UNWRITTEN_BYTES = 256 * 2**20
"""While more bytes than this are copied but unwritten, further blocks are dropped."""

ThreadPoolFactory = Callable[[int, str], Executor]
_CLOSE_TIMEOUT_SECONDS = 30.0


class BlockWriter:
    """The engine's loop calls all public methods except `promote_block`."""

    def __init__(
        self, tiers: Sequence[Tier], mover: BlockMover, make_threads: ThreadPoolFactory = ThreadPoolExecutor
    ) -> None:
        self._tiers = tiers
        self._mover = mover
        self._uncopied: dict[int, bytes] = {}
        self._copy_lock = Lock()
        self._store_lock = Lock()
        self.generation = 0
        """Incremented by each reset. Transfers that began before the reset are then dropped."""
        self._unwritten_bytes = 0
        self._thread = make_threads(1, "kv-put")
        self.num_stored: dict[str, int] = {tier.name: 0 for tier in tiers}
        self.num_not_stored = 0
        self.num_forced_copies = 0

    def write_blocks(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """`blocks` are in a prefix's order; the first then count as most recently used."""
        new_blocks = []
        for block, digest in reversed(blocks):
            is_stored = [tier.lookup(digest) for tier in self._tiers]  # a lookup counts as a use
            if not all(is_stored) and block not in self._uncopied:
                self._uncopied[block] = digest
                new_blocks.append(block)
        if new_blocks:
            self._thread.submit(self._copy_and_store_blocks, new_blocks, self.generation)

    def copy_before_reuse(self, blocks: Sequence[int]) -> None:
        if not self._uncopied:
            return
        for block in blocks:
            if block not in self._uncopied:
                continue
            with self._copy_lock:  # the thread may be copying this block
                digest = self._uncopied.pop(block, None)
                if digest is None:
                    continue
                if self._unwritten_bytes > _MAX_UNWRITTEN_BYTES:
                    self.num_not_stored += 1
                    continue
                copy = self._mover.read_block(block)
                self._unwritten_bytes += len(copy)
            self.num_forced_copies += 1
            self._thread.submit(self._store_forced_copy, digest, copy, self.generation)

    def discard_queued_and_stored_blocks(self) -> None:
        with self._copy_lock, self._store_lock:
            self.generation += 1
            self._uncopied.clear()
            for tier in self._tiers:
                tier.drop(None)

    def flush_and_stop(self) -> None:
        last = self._thread.submit(lambda: None)
        self._thread.shutdown(wait=False)
        wait([last], _CLOSE_TIMEOUT_SECONDS)

    def promote_block(self, digest: bytes, copy: BlockContent, tiers: Sequence[Tier], generation: int) -> None:
        """Thread-safe."""
        with self._store_lock:
            if generation == self.generation:
                for tier in tiers:
                    tier.put(digest, copy)

    def _copy_and_store_blocks(self, blocks: Sequence[int], generation: int) -> None:
        for block in blocks:
            with self._copy_lock:
                digest = self._uncopied.get(block)
                if digest is None or generation != self.generation:
                    continue
                copy = self._mover.read_block(block)
                del self._uncopied[block]
            self._store_in_tiers(digest, copy, generation)

    def _store_forced_copy(self, digest: bytes, copy: BlockContent, generation: int) -> None:
        self._store_in_tiers(digest, copy, generation)
        with self._copy_lock:
            self._unwritten_bytes -= len(copy)

    def _store_in_tiers(self, digest: bytes, copy: BlockContent, generation: int) -> None:
        for tier in self._tiers:
            with self._store_lock:
                if generation != self.generation:
                    return
                if not tier.lookup(digest):
                    tier.put(digest, copy)
                    is_page = len(copy) == self._mover.block_bytes
                    self.num_stored[tier.name] += is_page and tier.lookup(digest)
