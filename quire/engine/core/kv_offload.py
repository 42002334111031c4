"""What the scheduler asks of the tiers below the device's prefix cache (engine/tiers); here there are none."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.core.block_pool import BlockPool
from quire.engine.core.kv_cache.prefix_cache import PrefixCache
from quire.engine.core.request import Request
from quire.engine.core.scheduler_output import LoadedBlocks
from quire.engine.core.stats import TierStats


class KVOffloader:
    """Pages that leave the device are gone."""

    capacity_text = ""
    """How much each tier holds, for the log."""
    load_seconds = 0.0
    """How long sequences waited for pages, in all."""

    @property
    def has_open_loads(self) -> bool:
        """Whether some sequence waits for pages."""
        return False

    @property
    def num_blocks_lost(self) -> int:
        """Pages that no tier kept, for they came too fast."""
        return 0

    def attach_cache(self, pool: BlockPool, prefixes: PrefixCache) -> None:
        """Called once, by the scheduler whose pages these are."""

    def offload_blocks(self, request: Request) -> None:
        """A sequence is about to give back its pages."""

    def load_blocks(self, request: Request, cached: list[int]) -> bool:
        """Whether a sequence, of whose prefix the device has `cached`, is to wait for more of it: it is in no queue
        until `take_loaded_requests` returns it. The pool has pages for all its tokens."""
        return False

    def take_loaded_requests(self) -> Sequence[Request]:
        """The sequences that need not wait any more."""
        return ()

    def cancel_load(self, request: Request) -> None:
        """A sequence has ended; it may have waited for pages."""

    def wait_for_loads(self) -> None:
        """Wait a little for pages; while there is nothing to compute."""

    def take_loaded_blocks(self) -> list[LoadedBlocks]:
        """What came back since the last call."""
        return []

    def record_step_cost(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""

    def clear_tiers(self) -> None:
        """Forget all pages."""

    def tier_stats(self) -> list[TierStats]:
        return []

    def close_tiers(self) -> None:
        """End the threads; what is on its way to a tier is put there first."""
