"""What the scheduler asks of the tiers below the device's prefix cache (engine/tiers); NullKVOffloader: no tiers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from quire.engine.common.scheduler_output import BlockLoadRecord
from quire.engine.core.block_pool import BlockPool
from quire.engine.core.kv_cache.prefix_cache import PrefixCache
from quire.engine.core.request import Request
from quire.engine.core.stats import TierStats


class KVOffloader(ABC):
    """Moves KV blocks that leave the device to tiers, and loads them back."""

    capacity_text: str
    """Capacity of each tier, for the log."""
    load_seconds: float
    """Total time that requests waited for loads."""

    @property
    @abstractmethod
    def has_open_loads(self) -> bool:
        """True if a request waits for blocks."""

    @property
    @abstractmethod
    def num_blocks_not_stored(self) -> int:
        """Number of blocks that no tier stored, because they came too fast."""

    @abstractmethod
    def attach_cache(self, pool: BlockPool, prefixes: PrefixCache) -> None:
        """Called once, by the scheduler that owns the blocks."""

    @abstractmethod
    def offload_blocks_before_free(self, request: Request) -> None:
        """Store a request's blocks, which it is about to free."""

    @abstractmethod
    def try_begin_load(self, request: Request, cached: list[int]) -> bool:
        """True if a request, whose prefix has the blocks `cached` on the device, must wait for more of it. It is then
        in no queue until `take_loaded_requests` returns it. The pool has free blocks for all its tokens."""

    @abstractmethod
    def take_loaded_requests(self) -> Sequence[Request]:
        """The requests that need not wait any longer."""

    @abstractmethod
    def cancel_load(self, request: Request) -> None:
        """Drop a request that has ended. It may have waited for blocks."""

    @abstractmethod
    def wait_for_loads(self) -> None:
        """Wait briefly for blocks. Called only while there is nothing to compute."""

    @abstractmethod
    def take_load_records(self) -> list[BlockLoadRecord]:
        """The blocks that were loaded since the last call."""

    @abstractmethod
    def record_step_cost(self, tokens: int, seconds: float) -> None:
        """Record that a step of `tokens` tokens took `seconds`."""

    @abstractmethod
    def clear_tiers(self) -> None:
        """Forget all blocks."""

    @abstractmethod
    def tier_stats(self) -> list[TierStats]: ...

    @abstractmethod
    def close_tiers(self) -> None:
        """Store the blocks that are on their way to a tier, then end the threads."""


class NullKVOffloader(KVOffloader):
    """No tiers: blocks that leave the device are lost."""

    capacity_text = ""
    load_seconds = 0.0

    @property
    def has_open_loads(self) -> bool:
        return False

    @property
    def num_blocks_not_stored(self) -> int:
        return 0

    def attach_cache(self, pool: BlockPool, prefixes: PrefixCache) -> None:
        pass

    def offload_blocks_before_free(self, request: Request) -> None:
        pass

    def try_begin_load(self, request: Request, cached: list[int]) -> bool:
        return False

    def take_loaded_requests(self) -> Sequence[Request]:
        return ()

    def cancel_load(self, request: Request) -> None:
        pass

    def wait_for_loads(self) -> None:
        pass

    def take_load_records(self) -> list[BlockLoadRecord]:
        return []

    def record_step_cost(self, tokens: int, seconds: float) -> None:
        pass

    def clear_tiers(self) -> None:
        pass

    def tier_stats(self) -> list[TierStats]:
        return []

    def close_tiers(self) -> None:
        pass
