"""The first rank's decoder and adapters: what they are asked for, the other ranks are told first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError
from quire.engine.executor import AdapterLoader
from quire.engine.models.decoder import Decoder, KVCache
from quire.engine.types import Adapter
from quire.engine.worker.ranks.messages import (
    Embed,
    LoadAdapter,
    Logits,
    UseAdapter,
    adapters_of,
    array,
    forward,
)
from quire.engine.worker.ranks.processes import Ranks
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, Backend, LinearContext


class TensorRanks(Ranks):
    """The processes that compute every layer together with this one."""

    setting, called = "tensor_parallel_size", "ranks"

    def __init__(
        self, config: EngineConfig, backend: Backend, row_bytes: int, on_end: Callable[[int], None] | None = None
    ) -> None:
        """`row_bytes`: of the longest row that they put side by side. Raises ConfigError."""
        count = config.tensor_parallel_size
        try:
            memory = backend.ranks_memory(count, row_bytes)
        except ValueError as error:
            raise ConfigError(f"{self.setting}: {error}", param=self.setting) from error
        self.group = backend.collective(memory, 0, count)
        super().__init__(config, [[memory]] * (count - 1), on_end)

    def _let_go(self) -> None:
        self.group.close()


class LeadingDecoder(Decoder):
    """Call `lead` before use."""

    _ranks: Ranks
    _last: Tensor | None = None
    """What the last forward pass gave, which the other ranks have too."""

    def lead(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def forward_tapped(
        self,
        token_ids: Tensor,
        metadata: AttentionMetadata,
        kv_cache: KVCache,
        rows: Tensor,
        taps: Sequence[int],
    ) -> tuple[Tensor, list[Tensor]]:
        self._ranks.send(forward(token_ids, metadata, rows, tuple(taps)))
        with self._ranks.watched():
            hidden, tapped = super().forward_tapped(token_ids, metadata, kv_cache, rows, taps)
        self._last = hidden
        return hidden, tapped

    def embed(self, token_ids: Tensor) -> Tensor:
        self._ranks.send(Embed(array(token_ids)))
        with self._ranks.watched():
            return super().embed(token_ids)

    def logits(self, hidden: Tensor, context: LinearContext = NO_ADAPTERS) -> Tensor:
        self._ranks.send(Logits(None if hidden is self._last else array(hidden), adapters_of(context)))
        with self._ranks.watched():
            return super().logits(hidden, context)


class LeadingAdapters:
    """An AdapterLoader: each rank loads its part of an adapter by itself."""

    def __init__(self, own: AdapterLoader, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks

    def load(self, slot: int, adapter: Adapter) -> None:
        self._ranks.send(LoadAdapter(slot, adapter))
        self._own.load(slot, adapter)

    def loaded(self) -> list[tuple[int, str | None]]:
        found = self._own.loaded()
        for slot, failure in found:
            self._ranks.send(UseAdapter(slot, failed=failure is not None))
        return found

    def wait(self, seconds: float) -> None:
        self._own.wait(seconds)
