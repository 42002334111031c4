from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from quire.engine.common.scheduler_output import BlockLoadRecord
from quire.engine.core.kv_cache.block_pool import BlockPool
from quire.engine.core.kv_cache.prefix_cache import PrefixCache
from quire.engine.core.request import Request
from quire.engine.core.stats import TierStats


class KVOffloader(ABC):
    capacity_text: str
    load_seconds: float

    @property
    @abstractmethod
    def has_open_loads(self) -> bool:
        """True if a request waits for blocks."""

    @property
    @abstractmethod
    def num_blocks_not_stored(self) -> int:
        """These came too fast for any tier."""

    @abstractmethod
    def attach_cache(self, pool: BlockPool, prefixes: PrefixCache) -> None:
        """Called once by the scheduler."""

    @abstractmethod
    def offload_blocks_before_free(self, request: Request) -> None:
        """Store a request's blocks."""

    @abstractmethod
    def try_begin_load(self, request: Request, cached: list[int]) -> bool:
        """True if the request must wait for blocks beyond the device's `cached` ones. No queue holds it until
        `take_loaded_requests` returns it. The pool has free blocks for all its tokens.
        """

    @abstractmethod
    def take_loaded_requests(self) -> Sequence[Request]:
        """Requests that need not wait any longer."""

    @abstractmethod
    def cancel_load(self, request: Request) -> None:
        """The request has ended, perhaps while waiting."""

    @abstractmethod
    def wait_for_loads(self) -> None:
        """Waits briefly. Called only while there is nothing to compute."""

    @abstractmethod
    def take_load_records(self) -> list[BlockLoadRecord]:
        """Loads since the last call."""

    @abstractmethod
    def record_step_cost(self, tokens: int, seconds: float) -> None:
        """Learn what computing tokens costs."""

    @abstractmethod
    def clear_tiers(self) -> None:
        """Forget all blocks."""

    @abstractmethod
    def tier_stats(self) -> list[TierStats]: ...

    @abstractmethod
    def close_tiers(self) -> None:
        """Store blocks on their way, then end the threads."""
