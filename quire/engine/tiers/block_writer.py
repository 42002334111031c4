"""Pages on their way from the device to the tiers: copied in a thread, behind the computation.

A page is copied when a sequence that has it ends, or is preempted; the device's cache keeps it too, until its place is
needed. So what is taken then has mostly been copied; what has not is copied at once, before it is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from threading import Lock

from quire.engine.common.executor import BlockMover
from quire.engine.tiers.tier import BlockContent, Tier

_MAX_UNWRITTEN_BYTES = 256 * 2**20
"""Bytes of copies that wait to be put where they are to go; pages beyond that are not kept."""

ThreadPoolFactory = Callable[[int, str], Executor]
"""Makes so many threads of this name."""
_CLOSE_TIMEOUT_SECONDS = 30.0
"""Seconds that the end of an engine waits for what is on its way."""


class BlockWriter:
    """`write_blocks`, `copy_before_reuse` and `discard_queued_and_stored_blocks` are called by the engine's loop."""

    def __init__(
        self, tiers: Sequence[Tier], mover: BlockMover, make_threads: ThreadPoolFactory = ThreadPoolExecutor
    ) -> None:
        self._tiers = tiers
        self._mover = mover
        self._uncopied: dict[int, bytes] = {}
        """The pages that are to be copied, and their hashes. They are full: nobody writes to them until the pool hands
        them out again, and `copy_before_reuse` comes before that."""
        self._copy_lock = Lock()
        """Held while a page is copied."""
        self._store_lock = Lock()
        """Held while a copy is put into tiers."""
        self.generation = 0
        """Grows with every reset: what began to come or to go before it is not for the cache any more."""
        self._unwritten_bytes = 0
        """Bytes of the copies that `copy_before_reuse` made and that are not put yet."""
        self._thread = make_threads(1, "kv-put")
        self.num_stored: dict[str, int] = {tier.name: 0 for tier in tiers}
        """Pages put, by tier."""
        self.num_not_stored = 0
        """Pages that were not kept, for they came faster than they could be written."""
        self.num_forced_copies = 0
        """Pages that the loop had to copy itself."""

    def write_blocks(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Copy these full pages to the tiers that lack them. The first ones of a prefix count as used last."""
        new_blocks = []
        for block, digest in reversed(blocks):
            is_stored = [tier.lookup(digest) for tier in self._tiers]  # each is asked: asking counts as a use
            if not all(is_stored) and block not in self._uncopied:
                self._uncopied[block] = digest
                new_blocks.append(block)
        if new_blocks:
            self._thread.submit(self._copy_and_store_blocks, new_blocks, self.generation)

    def copy_before_reuse(self, blocks: Sequence[int]) -> None:
        """These pages are about to be overwritten: copy those now that were to be."""
        if not self._uncopied:
            return
        for block in blocks:
            if block not in self._uncopied:
                continue
            with self._copy_lock:  # the thread may be at this very page
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
        """Forget what is on its way, and all that the tiers have."""
        with self._copy_lock, self._store_lock:
            self.generation += 1
            self._uncopied.clear()
            for tier in self._tiers:
                tier.drop(None)

    def flush_and_stop(self) -> None:
        """Let the thread end when what is on its way is put; waits for it, but not for ever."""
        last = self._thread.submit(lambda: None)
        self._thread.shutdown(wait=False)
        wait([last], _CLOSE_TIMEOUT_SECONDS)

    def promote_block(self, digest: bytes, copy: BlockContent, tiers: Sequence[Tier], generation: int) -> None:
        """Put a page that came from a tier into those above it. Called by any thread."""
        with self._store_lock:
            if generation == self.generation:
                for tier in tiers:
                    tier.put(digest, copy)

    def _copy_and_store_blocks(self, blocks: Sequence[int], generation: int) -> None:
        """In the thread."""
        for block in blocks:
            with self._copy_lock:
                digest = self._uncopied.get(block)
                if digest is None or generation != self.generation:
                    continue
                copy = self._mover.read_block(block)
                del self._uncopied[block]
            self._store_in_tiers(digest, copy, generation)

    def _store_forced_copy(self, digest: bytes, copy: BlockContent, generation: int) -> None:
        """In the thread."""
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
                    is_page = len(copy) == self._mover.block_bytes  # else it is a snapshot
                    self.num_stored[tier.name] += is_page and tier.lookup(digest)
