"""One process that computes a model alone. Where others compute with it, Ranks (processes.py) do this otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.engine.core.executor import AdapterLoader, CollectiveRPC
from quire.engine.models.decoder import Decoder
from quire.engine.worker.draft_head_runner import DraftHeadRunner
from quire.engine.worker.loading.model.loaded_model import LoadedModel
from quire.engine.worker.model_runner import ModelRunner
from quire.engine.worker.ranks.rank_messages import AllocateCommand, RankCommand
from quire.engine.worker.ranks.rank_rpc import RankWorker, run_rank_call


class SingleProcess:
    note: str | None = None
    """Which processes there are, for the log."""

    def load_model(self, load_part: Callable[..., LoadedModel]) -> tuple[LoadedModel, int]:
        """This process' part of the model, which `load_part` loads, once all have theirs; and the bytes of what other
        stages hold. Of ranks that divide every layer it counts what all have read."""
        return load_part(), 0

    def available_kv_bytes(self, measure: Callable[[], int]) -> int:
        """Bytes for the KV cache, here and where others compute; `measure` finds this process'."""
        return measure()

    def allocate_on_followers(self, message: AllocateCommand) -> None:
        """All others make room. Raises ConfigError where one has too little memory."""

    def send_to_followers(self, message: RankCommand) -> None:
        """To all others, which read it when they have done what they were told before."""

    def runner(self, *parts: Any) -> ModelRunner:
        """This process', which leads the others'. `parts`: a Runner's."""
        return ModelRunner(*parts)

    def make_head_runner(self, *parts: Any) -> DraftHeadRunner:
        """`parts`: those of Heads."""
        return DraftHeadRunner(*parts)

    def wrap_adapter_loader(self, loader: AdapterLoader) -> AdapterLoader:
        """What loads adapters on all of them; `loader`: on this one."""
        return loader

    def make_collective_rpc(self, model: Decoder) -> CollectiveRPC | None:
        """What calls something on all of them; None: they take no calls. `model`: this one's part."""
        worker = RankWorker(0, 1, model)
        return lambda content: [run_rank_call(worker, content)]

    def stop_ranks(self) -> None:
        """End the others."""
