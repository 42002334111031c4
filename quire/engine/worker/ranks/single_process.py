from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.engine.common.executor import AdapterLoader, CollectiveRPC
from quire.engine.models.decoder import Decoder
from quire.engine.worker.draft_head_runner import DraftHeadRunner
from quire.engine.worker.loading.model.loaded_model import LoadedModel
from quire.engine.worker.model_runner import ModelRunner
from quire.engine.worker.ranks.rank_group import RankGroup
from quire.engine.worker.ranks.rank_messages import RankCommand
from quire.engine.worker.ranks.rank_rpc import RankWorker, run_rank_call


class SingleProcess(RankGroup):
    def load_model(self, load_part: Callable[..., LoadedModel]) -> tuple[LoadedModel, int]:
        return load_part(), 0

    def measure_total_kv_bytes(self, measure: Callable[[], int]) -> int:
        return measure()

    def allocate_on_followers(self, num_blocks: int, max_model_len: int, sequences: int, snapshots: int) -> None:
        pass

    def send_to_followers(self, message: RankCommand) -> None:
        pass

    def runner(self, *parts: Any) -> ModelRunner:
        return ModelRunner(*parts)

    def make_leader_draft_head_runner(self, *parts: Any) -> DraftHeadRunner:
        return DraftHeadRunner(*parts)

    def wrap_adapter_loader(self, loader: AdapterLoader) -> AdapterLoader:
        return loader

    def make_collective_rpc(self, model: Decoder) -> CollectiveRPC | None:
        worker = RankWorker(0, 1, model)
        return lambda content: [run_rank_call(worker, content)]

    def stop_ranks(self) -> None:
        pass
