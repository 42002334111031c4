from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from quire.engine.tiers.tier import BlockContent


class HostTier:
    name = "host"

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._blocks: OrderedDict[bytes, BlockContent] = OrderedDict()
        """Least recently used first."""
        self._bytes = 0
        self._lock = Lock()

    @property
    def num_blocks_and_bytes(self) -> tuple[int, int]:
        return len(self._blocks), self._bytes

    def lookup(self, digest: bytes) -> bool:
        with self._lock:
            if digest not in self._blocks:
                return False
            self._blocks.move_to_end(digest)
            return True

    def fetch(self, digest: bytes) -> BlockContent | None:
        with self._lock:
            return self._blocks.get(digest)

    def put(self, digest: bytes, page: BlockContent) -> None:
        with self._lock:
            if digest in self._blocks or len(page) > self._max_bytes:
                return
            self._blocks[digest] = page
            self._bytes += len(page)
            while self._bytes > self._max_bytes:
                _, oldest = self._blocks.popitem(last=False)
                self._bytes -= len(oldest)

    def drop(self, digest: bytes | None) -> None:
        with self._lock:
            if digest is None:
                self._blocks.clear()
                self._bytes = 0
            elif (page := self._blocks.pop(digest, None)) is not None:
                self._bytes -= len(page)
