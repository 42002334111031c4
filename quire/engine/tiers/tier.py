"""The interface of a tier: a place for KV pages below the device's cache, such as the host's memory, a disk, or a store
that others share."""

from __future__ import annotations

from typing import Protocol

BlockContent = bytes | memoryview


class Tier(Protocol):
    """Keeps pages by their hashes, 16 bytes each. Every method may be called from several threads at once. What a
    method raises is logged, and counts as a miss."""

    name: str
    """For metrics and explanations: "host", "disk"."""

    def lookup(self, digest: bytes) -> bool:
        """Whether `fetch` would find the page, which counts as a use of it. The engine's loop asks between two steps,
        so it must answer at once, from memory; it may be wrong."""

    def fetch(self, digest: bytes) -> BlockContent | None:
        """The page; None: it is not there. May take its time: only the requests that need the page wait."""

    def put(self, digest: bytes, page: BlockContent) -> None:
        """Keep a page, or not, if there is no room. May take its time."""

    def drop(self, digest: bytes | None) -> None:
        """Forget the page; None: forget all."""
