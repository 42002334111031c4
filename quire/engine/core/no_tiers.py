"""What the scheduler asks of the tiers below the device's prefix cache (engine/tiers); here there are none."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.core.block_pool import BlockPool
from quire.engine.core.prefix_cache import PrefixCache
from quire.engine.core.request import Request
from quire.engine.core.scheduler_output import LoadedBlocks
from quire.engine.core.stats import TierStats


class NoTiers:
    """Pages that leave the device are gone."""

    room = ""
    """How much each tier holds, for the log."""
    load_seconds = 0.0
    """How long sequences waited for pages, in all."""

    @property
    def busy(self) -> bool:
        """Whether some sequence waits for pages."""
        return False

    @property
    def lost(self) -> int:
        """Pages that no tier kept, for they came too fast."""
        return 0

    def serve(self, pool: BlockPool, prefixes: PrefixCache) -> None:
        """Called once, by the scheduler whose pages these are."""

    def keep(self, request: Request) -> None:
        """A sequence is about to give back its pages."""

    def load(self, request: Request, cached: list[int]) -> bool:
        """Whether a sequence, of whose prefix the device has `cached`, is to wait for more of it: it is in no queue
        until `arrived` returns it. The pool has pages for all its tokens."""
        return False

    def arrived(self) -> Sequence[Request]:
        """The sequences that need not wait any more."""
        return ()

    def forget(self, request: Request) -> None:
        """A sequence has ended; it may have waited for pages."""

    def wait(self) -> None:
        """Wait a little for pages; while there is nothing to compute."""

    def take_fetched(self) -> list[LoadedBlocks]:
        """What came back since the last call."""
        return []

    def computed(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""

    def reset(self) -> None:
        """Forget all pages."""

    def stats(self) -> list[TierStats]:
        return []

    def close(self) -> None:
        """End the threads; what is on its way to a tier is put there first."""
