"""Each rank reads its part of an adapter. A slot changes between the same steps as on the first rank."""

from __future__ import annotations

from collections import deque

from quire.engine.common.types import Adapter
from quire.engine.worker.loading.adapter_loader import ModelAdapterLoader

_WAIT_SECONDS = 1.0


class FollowerAdapterLoader:
    def __init__(self, loader: ModelAdapterLoader) -> None:
        self._loader = loader
        self._unclaimed_results: dict[int, deque[bool]] = {}

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        self._loader.load_adapter(slot, adapter)

    def await_adapter(self, slot: int, *, failed: bool) -> None:
        """`failed` says how the load ended on the first rank. Raises RuntimeError if it ended differently here."""
        while not self._unclaimed_results.get(slot):
            for filled, failure in self._loader.install_finished_loads():
                self._unclaimed_results.setdefault(filled, deque()).append(failure is not None)
            if not self._unclaimed_results.get(slot):
                self._loader.wait_for_any_load(_WAIT_SECONDS)
        if self._unclaimed_results[slot].popleft() != failed:
            raise RuntimeError("an adapter could be loaded by one rank and not by another")
