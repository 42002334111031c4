"""What is kept outside the engine's memory comes back as it was, or not at all.

A page is kept behind a header: what made it (engine/tiers/identity.py), its hash, its length, and a checksum of these
and of the page. A page that was torn, changed, or put there by another model or for other tokens is a miss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from hashlib import blake2b
from typing import TypeVar

from quire.engine.tiers.tier import Page, Tier

log = logging.getLogger("quire.tiers")
Result = TypeVar("Result")

_MAGIC = b"quireKV1"
_CHECKSUM = 16
HEADER_BYTES = len(_MAGIC) + 16 + 16 + 8 + _CHECKSUM


def seal(identity: bytes, digest: bytes, page: Page) -> bytes:
    """`identity` and `digest`: 16 bytes each."""
    head = _MAGIC + identity + digest + len(page).to_bytes(8, "little")
    return b"".join((head, _checksum(head, page), page))


def unseal(identity: bytes, digest: bytes, sealed: Page) -> memoryview | None:
    """The page; None where this is not what `seal` made of it."""
    view = memoryview(sealed)
    page = view[HEADER_BYTES:]
    head = _MAGIC + identity + digest + len(page).to_bytes(8, "little")
    whole = len(view) >= HEADER_BYTES and view[:HEADER_BYTES] == head + _checksum(head, page)
    return page if whole else None


def _checksum(head: bytes, page: Page) -> bytes:
    found = blake2b(head, digest_size=_CHECKSUM)
    found.update(page)
    return found.digest()


class SealedTier:
    """A Tier that seals what goes to another one, trusts nothing that comes back, and outlives what it raises."""

    def __init__(self, tier: Tier, identity: bytes) -> None:
        self.name = tier.name
        self._tier = tier
        self._identity = identity
        self._failing = False

    def lookup(self, digest: bytes) -> bool:
        return self._tried(lambda: self._tier.lookup(digest)) or False

    def fetch(self, digest: bytes) -> Page | None:
        if (sealed := self._tried(lambda: self._tier.fetch(digest))) is None:
            return None
        if (page := unseal(self._identity, digest, sealed)) is None:
            log.warning("a page of the %s tier was not what was put there", self.name)
            self.drop(digest)
        return page

    def put(self, digest: bytes, page: Page) -> None:
        self._tried(lambda: self._tier.put(digest, seal(self._identity, digest, page)))

    def drop(self, digest: bytes | None) -> None:
        self._tried(lambda: self._tier.drop(digest))

    def _tried(self, call: Callable[[], Result]) -> Result | None:
        """What it returns; None where it raises, which is logged once until something works again."""
        try:
            result = call()
        except Exception:
            if not self._failing:
                log.exception("the %s tier failed", self.name)
            self._failing = True
            return None
        self._failing = False
        return result
