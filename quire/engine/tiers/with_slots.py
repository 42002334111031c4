"""Copies of pages and of snapshots' slots as a tier's threads make them: by one number, which is a page's own or, of a
slot, ~slot."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from quire.engine.core.executor import PageMover


def state_key(digest: bytes) -> bytes:
    """By what tiers find the snapshot that stands at the end of a page with this hash."""
    return blake2b(digest, digest_size=16, person=b"quire state").digest()


class PagesAndSlots:
    """A PageMover of both."""

    def __init__(self, pages: PageMover, slots: PageMover) -> None:
        self._pages, self._slots = pages, slots
        self.page_bytes, self.layout = pages.page_bytes, pages.layout

    def claim(self, pages: Sequence[int]) -> None:
        self._pages.claim([page for page in pages if page >= 0])

    def read(self, page: int) -> memoryview:
        return self._pages.read(page) if page >= 0 else self._slots.read(~page)

    def write(self, page: int, content: bytes | memoryview) -> None:
        if page >= 0:
            self._pages.write(page, content)
        else:
            self._slots.write(~page, content)
