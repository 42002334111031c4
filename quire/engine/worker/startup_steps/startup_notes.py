from __future__ import annotations

from collections.abc import Callable

import torch

from quire.engine.checkpoint.kv_cache_groups import setting_requiring_full_kv
from quire.engine.checkpoint.kv_cache_plan import KVCachePlan
from quire.engine.common.config import EngineConfig
from quire.engine.common.types import EngineInfo
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.models.decoder import Decoder
from quire.engine.worker.device_plan import DevicePlan, kv_cache_dtype_name
from quire.engine.worker.loading.kv_allocation import RunnerResources
from quire.engine.worker.loading.transformers_support import transformers_description_suffix
from quire.engine.worker.ranks.rank_group import RankGroup
from quire.engine.worker.startup_steps.started_worker import make_engine_info
from quire.engine.worker.startup_steps.unused_gpus import unused_gpu_note
from quire.engine.worker.startup_steps.worker_weights import WorkerWeights
from quire.kernels.gpu.other_devices import is_other_device


def make_decoder_engine_info(
    config: EngineConfig,
    model_config: ModelConfig,
    device_plan: DevicePlan,
    weights: WorkerWeights,
    kv_plan: KVCachePlan,
    notes: list[str],
) -> EngineInfo:
    loaded_model = weights.loaded_model
    suffix = transformers_description_suffix(loaded_model.model)
    return make_engine_info(
        config,
        kv_plan,
        model_config.rope_context,
        dtype=str(device_plan.dtype).removeprefix("torch."),
        kv_cache_dtype=kv_cache_dtype_name(config, device_plan),
        device=str(device_plan.device),
        backend=f"{device_plan.backend.name} ({device_plan.backend_reason}{suffix})",
        weight_bytes=weights.weight_bytes,
        deterministic=weights.is_batch_invariant,
        tasks=loaded_model.tasks,
        notes=notes,
        quantization=loaded_model.quantization,
        no_images=weights.tower.text_only_reason,
        adaptable=dict(device_plan.spec.lora_target_sizes or {}),
    )


def startup_notes(
    config: EngineConfig,
    chosen: DevicePlan,
    model: Decoder,
    plan: KVCachePlan,
    allocation: RunnerResources,
    ranks: RankGroup,
) -> list[str | bool | None]:
    """Falsy notes do not apply."""
    device = chosen.device
    keeps_all_reason = setting_requiring_full_kv(config)
    is_limited = plan.request_slots < config.max_num_seqs
    windowed = any(each.window for each in chosen.spec.kv_cache_specs)
    snapshots = f", and {plan.snapshot_slots} snapshots are kept" if plan.snapshot_slots else ""
    slow = "slower than kernels made for it, without graphs, and tokens may depend on the batch"
    return [
        ranks.note,
        unused_gpu_note(config, device),
        device.type == "cuda"
        and config.data_parallel_size == 1  # replicas see only their own GPUs (client/replica_shares.py)
        and idle_gpus_note(
            torch.cuda.device_count(), config.world_size, lambda count: not chosen.spec.tensor_parallel_error(count)
        ),
        model.offload is not None and model.offload.summary,
        chosen.dtype_note,
        allocation.eager_prefill_reason
        and f"steps with prompts run without CUDA graphs: {allocation.eager_prefill_reason}",
        chosen.stepwise_recurrence_reason
        and f"recurrent layers compute long prompts token by token: {chosen.stepwise_recurrence_reason}",
        is_other_device(device) and f"PyTorch's own operations compute on {device.type}: {slow}",
        windowed
        and keeps_all_reason is not None
        and f"layers with a sliding window keep all tokens, because {keeps_all_reason} needs all layers' blocks",
        is_limited
        and f"{plan.request_slots} sequences run at a time, as their states take much memory{snapshots}: state_memory",
    ]


def idle_gpus_note(visible: int, used: int, can_use: Callable[[int], bool]) -> str | None:
    if visible <= used:
        return None
    most = max((count for count in range(used + 1, visible + 1) if can_use(count)), default=None)
    several = f", --tensor-parallel-size {most} divides it" if most is not None else ""
    are, copies = "is" if used == 1 else "are", visible // used
    on = "each" if used == 1 else f"{used} each"
    replicas = f"--data-parallel-size {copies} serves a copy of the model on {on}" if copies > 1 else ""
    return f"{visible} GPUs are visible, {used} {are} used: {replicas or 'the rest is idle'}{several}"
