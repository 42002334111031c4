"""One process that computes a model alone: what Ranks are where there are no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.engine.core.executor import AdapterLoader, Everywhere
from quire.engine.models.decoder import Decoder
from quire.engine.worker.heads import Heads
from quire.engine.worker.loading.model import LoadedModel
from quire.engine.worker.ranks.calls import RankWorker, called
from quire.engine.worker.ranks.messages import ToRank
from quire.engine.worker.runner import Runner


class SingleProcess:
    note = None

    def load(self, load: Callable[..., LoadedModel]) -> tuple[LoadedModel, int]:
        return load(), 0

    def available(self, measure: Callable[[], int]) -> int:
        return measure()

    def send(self, message: ToRank) -> None:
        pass

    def runner(self, *parts: Any) -> Runner:
        return Runner(*parts)

    def heads(self, *parts: Any) -> Heads:
        return Heads(*parts)

    def adapters(self, own: AdapterLoader) -> AdapterLoader:
        return own

    def everywhere(self, model: Decoder) -> Everywhere:
        worker = RankWorker(0, 1, model)
        return lambda content: [called(worker, content)]

    def close(self) -> None:
        pass
