"""Adds a header to blocks outside the engine's memory: identity, hash, length and checksum. Damaged or foreign blocks
count as misses.
"""

from __future__ import annotations

from hashlib import blake2b

from quire.engine.tiers.tier import BlockContent

_MAGIC = b"quireKV1"
_CHECKSUM_BYTES = 16
HEADER_BYTES = len(_MAGIC) + 16 + 16 + 8 + _CHECKSUM_BYTES


def seal_block(identity: bytes, digest: bytes, content: BlockContent) -> bytes:
    """`identity` and `digest` have 16 bytes each."""
    head = _MAGIC + identity + digest + len(content).to_bytes(8, "little")
    return b"".join((head, _checksum(head, content), content))


def unseal_block(identity: bytes, digest: bytes, sealed: BlockContent) -> memoryview | None:
    """Return None if the block is damaged or foreign."""
    view = memoryview(sealed)
    content = view[HEADER_BYTES:]
    head = _MAGIC + identity + digest + len(content).to_bytes(8, "little")
    is_intact = len(view) >= HEADER_BYTES and view[:HEADER_BYTES] == head + _checksum(head, content)
    return content if is_intact else None


def _checksum(head: bytes, content: BlockContent) -> bytes:
    hasher = blake2b(head, digest_size=_CHECKSUM_BYTES)
    hasher.update(content)
    return hasher.digest()
