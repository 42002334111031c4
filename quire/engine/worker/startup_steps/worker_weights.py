from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quire.engine.common.config import EngineConfig
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.worker.device_memory import explain_weights_out_of_memory
from quire.engine.worker.device_plan import DevicePlan
from quire.engine.worker.drafter_loader import load_drafter
from quire.engine.worker.images.tower_loader import LoadedTower, load_tower
from quire.engine.worker.loading.drafts.device_drafter import LoadedDrafter
from quire.engine.worker.loading.model.loaded_model import LoadedModel
from quire.engine.worker.loading.model.weight_sizes import weight_bytes_in_memory
from quire.engine.worker.loading.model_loader import load_model
from quire.engine.worker.loading.transformers_support import transformers_batch_invariance_and_notes
from quire.engine.worker.loading.weight_loader import NamedTensors
from quire.engine.worker.ranks.rank_group import RankGroup


@dataclass(frozen=True, slots=True)
class WorkerWeights:
    loaded_model: LoadedModel
    tower: LoadedTower
    drafter: LoadedDrafter | None
    weight_bytes: int
    is_batch_invariant: bool
    transformers_notes: list[str]


def load_worker_weights(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    device_plan: DevicePlan,
    ranks: RankGroup,
    progress: Callable[[], None],
    tensors: NamedTensors | None,
) -> WorkerWeights:
    """Raises ConfigError."""
    backend = device_plan.backend
    with explain_weights_out_of_memory(backend):
        loaded_model, other_stages_bytes = ranks.load_model(
            partial(load_model, config, path, model_config, device_plan, progress, tensors)
        )
        model = loaded_model.model
        tower = load_tower(config, path, model_config, device_plan, progress, stage=config.pipeline_parallel_size - 1)
        model_bytes = weight_bytes_in_memory(model.parameters(), config, backend, loaded_model.read_bytes)
        if model.offload is not None:
            model_bytes -= model.offload.saved_bytes
        drafter = load_drafter(config, model_config, backend, progress, model)
        is_batch_invariant, notes = transformers_batch_invariance_and_notes(
            config, model, backend, backend.is_batch_invariant(device_plan.device, device_plan.dtype)
        )
    draft_bytes = 0 if drafter is None else drafter.weight_bytes
    return WorkerWeights(
        loaded_model=loaded_model,
        tower=tower,
        drafter=drafter,
        weight_bytes=tower.weight_bytes + other_stages_bytes + max(model_bytes, 0) + draft_bytes,
        is_batch_invariant=is_batch_invariant,
        transformers_notes=notes,
    )
