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
    def has_open_loads(self) -> bool: ...

    @property
    @abstractmethod
    def num_blocks_not_stored(self) -> int:
        """Number of blocks that no tier stored, because they came too fast."""

    @abstractmethod
    def attach_cache(self, pool: BlockPool, prefixes: PrefixCache) -> None: ...

    @abstractmethod
    def offload_blocks_before_free(self, request: Request) -> None: ...

    @abstractmethod
    def try_begin_load(self, request: Request, cached: list[int]) -> bool:
        """True if the request must wait for blocks that follow the blocks `cached` on the device. The request is in no
        queue until `take_loaded_requests` returns it. The pool must have free blocks for all its tokens.
        """

    @abstractmethod
    def take_loaded_requests(self) -> Sequence[Request]:
        """Return the requests that need not wait any longer."""

    @abstractmethod
    def cancel_load(self, request: Request) -> None:
        """Called when a request has ended. Cancels its load if it waits for one."""

    @abstractmethod
    def wait_for_loads(self) -> None:
        """Called only while there is nothing to compute."""

    @abstractmethod
    def take_load_records(self) -> list[BlockLoadRecord]: ...

    @abstractmethod
    def record_step_cost(self, tokens: int, seconds: float) -> None: ...

    @abstractmethod
    def clear_tiers(self) -> None: ...

    @abstractmethod
    def tier_stats(self) -> list[TierStats]: ...

    @abstractmethod
    def close_tiers(self) -> None:
        """Store the blocks that are still queued, then end the threads."""
