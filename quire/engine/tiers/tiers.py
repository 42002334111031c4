"""What the scheduler knows of the tiers below the device's prefix cache: pages go there when sequences leave, and come
back when a prefix is wanted again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from quire.engine import clock
from quire.engine.core.block_pool import BlockPool
from quire.engine.core.executor import PageMover
from quire.engine.core.no_tiers import NoTiers
from quire.engine.core.prefix_cache import PrefixCache
from quire.engine.core.request import Request
from quire.engine.core.scheduler_output import LoadedBlocks
from quire.engine.core.stats import TierStats
from quire.engine.tiers.costs import Costs
from quire.engine.tiers.loads import PATIENCE, Load, Loads, State
from quire.engine.tiers.outside import OutsideTier
from quire.engine.tiers.tier import Tier
from quire.engine.tiers.with_slots import PagesAndSlots, state_key
from quire.engine.tiers.writer import Threads, Writer

Size = Callable[[], tuple[int, int]]
"""Pages, and bytes, that a tier has."""


class Tiers(NoTiers):
    """Tiers, the nearest first: each page goes to all of them, and comes back from the first that has it."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        mover: PageMover,
        costs: Costs,
        sizes: Mapping[str, Size] | None = None,
        room: str = "",
        states: PageMover | None = None,
        *,
        put_threads: Threads = ThreadPoolExecutor,
        fetch_threads: Threads = ThreadPoolExecutor,
        patience: float = PATIENCE,
    ) -> None:
        """`sizes`: of those that have one, by name. `states`: what copies slots, where prefixes need snapshots.
        `patience`: seconds that a sequence waits for its pages."""
        self.costs = costs
        self.room = room
        self._tiers = tiers
        self._mover = mover = mover if states is None else PagesAndSlots(mover, states)
        state_bytes = 0 if states is None else states.page_bytes
        self._sizes = sizes or {}
        self._writer = Writer(tiers, mover, put_threads)
        self._fetching = state_bytes, fetch_threads, patience
        self._loaded: set[str] = set()
        """Requests that compute what is missing now: each begins one load between two times that it runs, for while it
        waits others may take the pages that came, again and again. So do those for which not all came."""
        self._fetched: list[LoadedBlocks] = []
        self._counts = {tier.name: (0, 0.0) for tier in tiers}
        """By tier: pages fetched, and the seconds they took."""

    def serve(self, pool: BlockPool, prefixes: PrefixCache) -> None:
        self._prefixes = prefixes
        self._pool = pool
        self._loads = Loads(self._tiers, self._mover, pool, self._writer.promote, *self._fetching)
        pool.before_reuse = self._writer.secure
        prefixes.snapshots.watch(self._writer.secure)

    @property
    def busy(self) -> bool:
        return self._loads.busy

    @property
    def lost(self) -> int:
        return self._writer.lost

    def keep(self, request: Request) -> None:
        self._loaded.discard(request.engine_request.id)
        slots = {digest: slot for slot, digest in self._prefixes.snapshots.full_slots(request)}
        found = list[tuple[int, bytes]]()
        for page, digest in self._prefixes.full_pages(request):  # a snapshot counts as used behind its page
            found += [(slots[digest], state_key(digest))] if digest in slots else []
            found.append((page, digest))
        self._writer.keep(found)

    def load(self, request: Request, cached: list[int]) -> bool:
        if request.engine_request.id in self._loaded:
            return False
        pieces, held = self._prefixes.block_hashes(request), cached
        if self._prefixes.snapshots.needed:  # the device may have pages behind the last one with a snapshot
            held = self._pool.get_cached_prefix([each[-1] for each in pieces])
        wanted = pieces[len(held) :]
        if wanted and self._loads.join(request, wanted[0][-1]):
            return True
        found = []
        for each in wanted:
            tier = next((tier.name for tier in self._tiers if tier.lookup(each[-1])), None)
            if tier is None:
                break
            found.append(tier)
        end = len(held) + (self.costs.worthwhile(found) if found else 0)
        state, count = self._with_state([each[-1] for each in pieces[len(cached) : end]])
        if not count:
            return False
        end = len(cached) + count
        new = max(end - len(held), 0)
        self._loads.begin(request, held[:end], wanted[:new], found[:new], self._writer.generation, state)
        self._loaded.add(request.engine_request.id)
        return True

    def _with_state(self, digests: Sequence[bytes]) -> tuple[State | None, int]:
        """Of pages with these hashes, behind how many of the first ones there is a snapshot where one is needed; and
        room for it, if it must come from a tier."""
        snapshots = self._prefixes.snapshots
        for count in range(len(digests), 0, -1):
            if snapshots.knows(digest := digests[count - 1]):
                return None, count
            if any(tier.lookup(state_key(digest)) for tier in self._tiers):
                slot = snapshots.room()
                return (None, 0) if slot is None else (State(slot, digest), count)
        return None, 0

    def arrived(self) -> Sequence[Request]:
        if not self._loads.pending:
            return ()
        now, found = clock.monotonic(), list[Request]()
        ended, late = self._loads.take(now)
        for load, seqs in late:
            if load.tiers:
                self.costs.fetched(load.tiers[min(load.filled, len(load.tiers) - 1)], 1, now - load.began)
            self.load_seconds += len(seqs) * (now - load.began)
            self._loaded |= {engine_request.engine_request.id for engine_request in seqs}
            found += seqs
        for load in ended:
            self._learn(load)
            if load.generation == self._writer.generation:
                for page, pieces in zip(load.pages[: load.filled], load.digests, strict=False):
                    for digest in pieces:
                        self._pool.cache_block(page, digest)
            if load.state is not None:
                whole = load.has_state and load.generation == self._writer.generation
                self._prefixes.snapshots.came(*load.state, whole=whole)
            if load.filled < len(load.pages) or (load.state is not None and not load.has_state):
                self._loaded |= {request.engine_request.id for request in load.seqs}
            found += load.seqs
            self._loads.release(load)
        return found

    def _learn(self, load: Load) -> None:
        """Count what a load brought, and what it cost."""
        size = self._prefixes.block_size
        for tier, (pages, seconds) in load.fetched.items():
            before = self._counts[tier]
            self._counts[tier] = (before[0] + pages, before[1] + seconds)
            self.costs.fetched(tier, pages, seconds)
            for request in load.seqs:
                self._fetched.append(
                    LoadedBlocks(request.engine_request.id, tier, pages * size, load.began, load.ended)
                )
        self.load_seconds += len(load.seqs) * (load.ended - load.began)

    def forget(self, request: Request) -> None:
        self._loaded.discard(request.engine_request.id)
        self._loads.forget(request)

    def wait(self) -> None:
        self._loads.wait()

    def take_fetched(self) -> list[LoadedBlocks]:
        fetched, self._fetched = self._fetched, []
        return fetched

    def computed(self, tokens: int, seconds: float) -> None:
        self.costs.computed(tokens, seconds)

    def reset(self) -> None:
        self._writer.reset()

    def stats(self) -> list[TierStats]:
        found = []
        for tier in self._tiers:
            fetched, seconds = self._counts[tier.name]
            stored, size, each = self._writer.stored[tier.name], self._prefixes.block_size, self._mover.page_bytes
            held = self._sizes[tier.name]() if tier.name in self._sizes else (0, 0)
            off = isinstance(tier, OutsideTier) and tier.off
            found.append(
                TierStats(
                    tier.name, *held, fetched, fetched * size, fetched * each, seconds, stored, stored * each, off
                )
            )
        return found

    def close(self) -> None:
        self._loads.close()
        self._writer.close()
        for tier in self._tiers:
            if isinstance(tier, OutsideTier):
                tier.close()
