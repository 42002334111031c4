"""What is kept outside the engine's memory comes back as it was, or not at all.

A page is kept behind a header: what made it (engine/tiers/identity.py), its hash, its length, and a checksum of these
and of the page. A page that was torn, changed, or put there by another model or for other tokens is a miss.
"""

from __future__ import annotations

from hashlib import blake2b

from quire.engine.tiers.tier import Page

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
