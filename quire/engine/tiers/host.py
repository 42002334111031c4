"""The host tier: pages in the engine's own memory, up to a number of bytes, least recently used out."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from quire.engine.tiers.tier import Page


class HostTier:
    """A Tier. What it holds ends with the engine."""

    name = "host"

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._pages: OrderedDict[bytes, Page] = OrderedDict()
        """The least recently used first."""
        self._bytes = 0
        self._lock = Lock()

    @property
    def size(self) -> tuple[int, int]:
        """Pages, and their bytes."""
        return len(self._pages), self._bytes

    def lookup(self, digest: bytes) -> bool:
        with self._lock:
            if digest not in self._pages:
                return False
            self._pages.move_to_end(digest)
            return True

    def fetch(self, digest: bytes) -> Page | None:
        with self._lock:
            return self._pages.get(digest)

    def put(self, digest: bytes, page: Page) -> None:
        with self._lock:
            if digest in self._pages or len(page) > self._most:
                return
            self._pages[digest] = page
            self._bytes += len(page)
            while self._bytes > self._most:
                _, oldest = self._pages.popitem(last=False)
                self._bytes -= len(oldest)

    def drop(self, digest: bytes | None) -> None:
        with self._lock:
            if digest is None:
                self._pages.clear()
                self._bytes = 0
            elif (page := self._pages.pop(digest, None)) is not None:
                self._bytes -= len(page)
