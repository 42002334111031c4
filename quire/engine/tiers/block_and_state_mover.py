"""Copies of pages and of snapshots' slots as a tier's threads make them: by one number, which is a page's own or, of a
slot, ~slot."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from quire.engine.common.executor import BlockMover


def state_key(digest: bytes) -> bytes:
    """By what tiers find the snapshot that stands at the end of a page with this hash."""
    return blake2b(digest, digest_size=16, person=b"quire state").digest()


class BlockAndStateMover:
    """A BlockMover of both."""

    def __init__(self, block_mover: BlockMover, state_mover: BlockMover) -> None:
        self._block_mover, self._state_mover = block_mover, state_mover
        self.block_bytes, self.layout = block_mover.block_bytes, block_mover.layout

    def announce_block_writes(self, blocks: Sequence[int]) -> None:
        self._block_mover.announce_block_writes([block for block in blocks if block >= 0])

    def read_block(self, block: int) -> memoryview:
        return self._block_mover.read_block(block) if block >= 0 else self._state_mover.read_block(~block)

    def write_block(self, block: int, content: bytes | memoryview) -> None:
        if block >= 0:
            self._block_mover.write_block(block, content)
        else:
            self._state_mover.write_block(~block, content)
