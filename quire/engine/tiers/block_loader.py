"""Loads KV blocks into the prefix cache, where the requests that waited for them find them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.engine.common import clock
from quire.engine.common.executor import BlockMover
from quire.engine.core.kv_cache.block_pool import BlockPool
from quire.engine.core.request import Request, RequestStatus
from quire.engine.tiers.block_and_state_mover import state_key
from quire.engine.tiers.block_writer import ThreadPoolFactory
from quire.engine.tiers.tier import BlockContent, Tier

log = logging.getLogger("quire.tiers")

_THREADS = 4
LOAD_TIMEOUT_SECONDS = 10.0
"""After this time a request computes the blocks instead."""
_POLL_SECONDS = 0.005
"""Interval at which an idle engine looks for messages."""


PromoteCallback = Callable[[bytes, BlockContent, Sequence[Tier], int], None]


class IncomingSnapshot(NamedTuple):
    slot: int
    digest: bytes
    """Hash of the block after which the snapshot was taken."""


@dataclass(eq=False, slots=True)
class BlockLoad:
    waiting: list[Request]
    cached_blocks: list[int]
    blocks: list[int]
    digests: list[Sequence[bytes]]
    """For each block: the hashes of its beginnings, then the hash of the whole block."""
    tiers: list[str]
    began_at: float
    generation: int
    snapshot: IncomingSnapshot | None = None
    has_snapshot: bool = False
    num_filled: int = 0
    """The first `num_filled` of `blocks` have arrived."""
    loads_by_tier: dict[str, tuple[int, float]] = field(default_factory=dict)
    """(blocks, seconds), keyed by tier."""
    is_running: bool = False
    ended_at: float = 0.0


class BlockLoader:
    """The engine's loop calls the public methods."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        mover: BlockMover,
        pool: BlockPool,
        promote_block: PromoteCallback,
        snapshot_bytes: int = 0,
        threads: ThreadPoolFactory = ThreadPoolExecutor,
        timeout: float = LOAD_TIMEOUT_SECONDS,
    ) -> None:
        """`promote_block`: called in threads with a block that was found in another tier than the first."""
        self._snapshot_bytes, self._timeout = snapshot_bytes, timeout
        self._promote_block = promote_block
        self._tiers = tiers
        self._mover = mover
        self._pool = pool
        self._open_loads: list[BlockLoad] = []
        self._overdue_loads: list[BlockLoad] = []
        """Loads without waiting requests. They keep their blocks until they end."""
        self._load_by_hash: dict[bytes, BlockLoad] = {}
        self._finished: deque[BlockLoad] = deque()
        self._finished_event = threading.Event()
        self._threads = threads(_THREADS, "kv-fetch")

    @property
    def has_open_loads(self) -> bool:
        """Overdue loads do not count."""
        return bool(self._open_loads)

    @property
    def has_loads(self) -> bool:
        return bool(self._open_loads or self._overdue_loads)

    def join_load(self, request: Request, digest: bytes) -> bool:
        if (load := self._load_by_hash.get(digest)) is None:
            return False
        load.waiting.append(request)
        request.status = RequestStatus.LOADING
        return True

    def begin_load(
        self,
        request: Request,
        cached_blocks: list[int],
        digests: list[Sequence[bytes]],
        tiers: list[str],
        generation: int,
        snapshot: IncomingSnapshot | None = None,
    ) -> None:
        """The pool must have enough free blocks."""
        self._pool.ref(cached_blocks)
        blocks = self._pool.allocate(len(digests))
        self._mover.announce_block_writes(blocks)
        load = BlockLoad([request], cached_blocks, blocks, digests, tiers, clock.monotonic(), generation, snapshot)
        self._open_loads.append(load)
        self._load_by_hash |= {hashes[-1]: load for hashes in digests}
        request.status = RequestStatus.LOADING
        self._threads.submit(self._run_load, load)

    def take_finished_and_overdue_loads(
        self, now: float
    ) -> tuple[list[BlockLoad], list[tuple[BlockLoad, list[Request]]]]:
        """Return finished loads, which the caller must release, and overdue loads with the requests that no longer wait
        for them.
        """
        self._finished_event.clear()
        finished = []
        while self._finished:
            load = self._finished.popleft()
            (self._open_loads if load in self._open_loads else self._overdue_loads).remove(load)
            finished.append(load)
        overdue = [load for load in self._open_loads if now - load.began_at > self._timeout]
        timed_out = []
        for load in overdue:
            self._open_loads.remove(load)
            self._overdue_loads.append(load)
            timed_out.append((load, load.waiting))
            load.waiting = []
        for load in [*finished, *overdue]:
            for hashes in load.digests:
                if self._load_by_hash.get(hashes[-1]) is load:
                    del self._load_by_hash[hashes[-1]]
        for requests in [*(load.waiting for load in finished), *(requests for _, requests in timed_out)]:
            for request in requests:
                request.status = RequestStatus.WAITING
        return finished, timed_out

    def release_load(self, load: BlockLoad) -> None:
        self._pool.unref(load.cached_blocks + load.blocks)

    def remove_request(self, request: Request) -> None:
        """Its blocks are still loaded."""
        for load in self._open_loads:
            if request in load.waiting:
                load.waiting.remove(request)

    def wait_for_load(self) -> None:
        self._finished_event.wait(_POLL_SECONDS)

    def shut_down(self) -> None:
        for load in self._open_loads:
            load.waiting = []
        self._threads.shutdown(wait=False, cancel_futures=True)
        deadline = clock.monotonic() + self._timeout
        while any(not load.ended_at for load in self._open_loads if load.is_running) and clock.monotonic() < deadline:
            self._finished_event.clear()
            self._finished_event.wait(_POLL_SECONDS)

    def _run_load(self, load: BlockLoad) -> None:
        load.is_running = True
        try:
            for block, hashes in zip(load.blocks, load.digests, strict=True):
                if not load.waiting or not self._fill_block(load, block, hashes[-1]):
                    break
            else:
                snapshot = load.snapshot
                load.has_snapshot = snapshot is not None and self._fill_block(
                    load, ~snapshot.slot, state_key(snapshot.digest)
                )
        except Exception:  # the request computes the blocks that are missing
            log.exception("KV blocks cannot be copied to the device")
        load.ended_at = clock.monotonic()
        self._finished.append(load)
        self._finished_event.set()

    def _fill_block(self, load: BlockLoad, block: int, digest: bytes) -> bool:
        """Fetch a block, or the state of ~slot, from the first tier that has it."""
        num_bytes = self._mover.block_bytes if block >= 0 else self._snapshot_bytes
        for index, tier in enumerate(self._tiers):
            began_at = clock.monotonic()
            content = tier.fetch(digest)
            if content is None or len(content) != num_bytes:
                continue
            self._mover.write_block(block, content)
            if block >= 0:
                num_blocks, seconds = load.loads_by_tier.get(tier.name, (0, 0.0))
                load.loads_by_tier[tier.name] = (num_blocks + 1, seconds + clock.monotonic() - began_at)
                load.num_filled += 1
            if index:
                self._promote_block(digest, content, self._tiers[:index], load.generation)
            return True
        return False
