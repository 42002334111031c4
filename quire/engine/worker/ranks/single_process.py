"""One process that computes a model alone. Where others compute with it, Ranks (processes.py) do this otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.engine.core.executor import AdapterLoader, CollectiveRPC
from quire.engine.models.decoder import Decoder
from quire.engine.worker.heads import Heads
from quire.engine.worker.loading.model import LoadedModel
from quire.engine.worker.ranks.calls import RankWorker, called
from quire.engine.worker.ranks.messages import Allocate, ToRank
from quire.engine.worker.runner import ModelRunner


class SingleProcess:
    note: str | None = None
    """Which processes there are, for the log."""

    def load(self, load: Callable[..., LoadedModel]) -> tuple[LoadedModel, int]:
        """This process' part of the model, which `load` loads, once all have theirs; and the bytes of what other stages
        hold. Of ranks that divide every layer it counts what all have read."""
        return load(), 0

    def available(self, measure: Callable[[], int]) -> int:
        """Bytes for the KV cache, here and where others compute; `measure` finds this process'."""
        return measure()

    def allocate(self, message: Allocate) -> None:
        """All others make room. Raises ConfigError where one has too little memory."""

    def send(self, message: ToRank) -> None:
        """To all others, which read it when they have done what they were told before."""

    def runner(self, *parts: Any) -> ModelRunner:
        """This process', which leads the others'. `parts`: a Runner's."""
        return ModelRunner(*parts)

    def heads(self, *parts: Any) -> Heads:
        """`parts`: those of Heads."""
        return Heads(*parts)

    def adapters(self, own: AdapterLoader) -> AdapterLoader:
        """What loads adapters on all of them; `own`: on this one."""
        return own

    def everywhere(self, model: Decoder) -> CollectiveRPC | None:
        """What calls something on all of them; None: they take no calls. `model`: this one's part."""
        worker = RankWorker(0, 1, model)
        return lambda content: [called(worker, content)]

    def close(self) -> None:
        """End the others."""
