"""Adapters on several ranks: each reads its part of one by itself, and has it in the slot when the first rank has."""

from __future__ import annotations

from collections import deque

from quire.engine.types import Adapter
from quire.engine.worker.loading.adapters import ModelAdapters

_WAIT_SECONDS = 1.0


class RankAdapters:
    """Those of a rank but the first; the first one has LeadingAdapters (processes.py)."""

    def __init__(self, own: ModelAdapters) -> None:
        self._own = own
        self._settled: dict[int, deque[bool]] = {}
        """By slot: whether each of its adapters failed, of those that the first rank has not settled yet."""

    def load(self, slot: int, adapter: Adapter) -> None:
        self._own.load(slot, adapter)

    def use(self, slot: int, *, failed: bool) -> None:
        """Wait until an adapter is in its slot, which the first rank's is, or has `failed` to be."""
        while not self._settled.get(slot):
            for filled, failure in self._own.loaded():
                self._settled.setdefault(filled, deque()).append(failure is not None)
            if not self._settled.get(slot):
                self._own.wait(_WAIT_SECONDS)
        if self._settled[slot].popleft() != failed:
            raise RuntimeError("an adapter could be loaded by one rank and not by another")
