from __future__ import annotations

from typing import Protocol

BlockContent = bytes | memoryview


class Tier(Protocol):
    """A store for KV blocks: host memory, a disk, or a shared store.

    Each `digest` has 16 bytes. Several threads may call any method at once. Exceptions are logged and count as misses.
    """

    name: str

    def lookup(self, digest: bytes) -> bool:
        """Return True if `fetch` would find the block. A lookup counts as a use of the block.

        The engine's loop calls this between steps, so it must answer at once, from memory. The answer may be wrong.
        """

    def fetch(self, digest: bytes) -> BlockContent | None:
        """Return the block, or None if it is missing. May be slow, because only requests that need the block wait."""

    def put(self, digest: bytes, page: BlockContent) -> None:
        """Store a block, or do nothing if there is no room. May be slow."""

    def drop(self, digest: bytes | None) -> None:
        """Forget a block, or all if `digest` is None."""
