"""Adapters on several ranks: each reads its part of one by itself, and has it in the slot when the first rank has."""

from __future__ import annotations

from collections import deque

from quire.engine.common.types import Adapter
from quire.engine.worker.loading.adapter_loader import ModelAdapterLoader

_WAIT_SECONDS = 1.0


class FollowerAdapterLoader:
    """Those of a rank but the first; the first one has LeaderAdapterLoader (processes.py)."""

    def __init__(self, loader: ModelAdapterLoader) -> None:
        self._loader = loader
        self._unclaimed_results: dict[int, deque[bool]] = {}
        """By slot: whether each of its adapters failed, of those that the first rank has not settled yet."""

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        self._loader.load_adapter(slot, adapter)

    def await_adapter(self, slot: int, *, failed: bool) -> None:
        """Wait until an adapter is in its slot, which the first rank's is, or has `failed` to be."""
        while not self._unclaimed_results.get(slot):
            for filled, failure in self._loader.install_finished_loads():
                self._unclaimed_results.setdefault(filled, deque()).append(failure is not None)
            if not self._unclaimed_results.get(slot):
                self._loader.wait_for_any_load(_WAIT_SECONDS)
        if self._unclaimed_results[slot].popleft() != failed:
            raise RuntimeError("an adapter could be loaded by one rank and not by another")
