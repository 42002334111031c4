from __future__ import annotations

from collections.abc import Sequence

from quire.engine.core.request import Request
from quire.engine.processes.kv_events import ENGINE_MEDIUM, AllBlocksCleared, BlockRemoved, BlockStored

_DIGEST_BYTES = 16
"""block_pool.py appends the group's number to these digests."""


class PrefixCacheEvents:
    """Blocks that were stored and removed since the last `drain_events`, in order."""

    def __init__(self, hash_block_size: int) -> None:
        self._hash_block_size = hash_block_size
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        self._last_stored: tuple[BlockStored, str, int] | None = None
        """The last event if it can be extended, its request's id, and the index of the block that may extend it."""

    def drain_events(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        events = self._events
        self._events = []
        self._last_stored = None
        return events

    def record_stored(self, request: Request, index: int, digest: bytes, group: int) -> None:
        """`index` counts blocks of `hash_block_size` tokens, from 0."""
        size = self._hash_block_size
        token_ids = list(request.token_ids[index * size : (index + 1) * size])
        group_idx = group or None
        if self._last_stored is not None:
            event, request_id, following = self._last_stored
            if (request_id, following, event.group_idx) == (request.engine_request.id, index, group_idx):
                event.block_hashes.append(_number(digest))
                event.token_ids += token_ids
                self._last_stored = event, request_id, index + 1
                return
        parent = _number(request.block_hashes(index, size)[-1]) if index else None
        adapter = request.engine_request.adapter
        name = None if adapter is None else adapter.name
        event = BlockStored([_number(digest)], parent, token_ids, size, None, ENGINE_MEDIUM, name, group_idx)
        self._events.append(event)
        self._last_stored = event, request.engine_request.id, index + 1

    def record_removed(self, digests: Sequence[bytes]) -> None:
        if digests:
            group_idx = digests[0][_DIGEST_BYTES] if len(digests[0]) > _DIGEST_BYTES else None
            self._events.append(BlockRemoved([_number(each) for each in digests], ENGINE_MEDIUM, group_idx))
            self._last_stored = None

    def record_cleared(self) -> None:
        self._events.append(AllBlocksCleared())
        self._last_stored = None


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")
