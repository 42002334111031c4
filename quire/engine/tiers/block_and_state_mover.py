"""Moves KV blocks, whose numbers start at 0, and state snapshots, whose number is ~slot."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from quire.engine.common.executor import BlockMover


def state_key(digest: bytes) -> bytes:
    return blake2b(digest, digest_size=16, person=b"quire state").digest()


class BlockAndStateMover:
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
