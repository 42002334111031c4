from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from quire.engine.checkpoint.model_resolver import resolve_weights
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import refuse_setting_if
from quire.engine.settings.class_import import import_class
from quire.engine.worker.device_plan import DevicePlan, can_capture_decodes, kv_cache_dtype_name
from quire.engine.worker.ranks.pipeline import Stages
from quire.engine.worker.ranks.rank_group import RankGroup
from quire.engine.worker.ranks.single_process import SingleProcess
from quire.engine.worker.ranks.spmd import SpmdRanks
from quire.kernels.gpu.other_devices import is_other_device

_ExecutorClass = TypeVar("_ExecutorClass", bound=RankGroup)


def start_ranks(
    config: EngineConfig,
    path: Path,
    chosen: DevicePlan,
    progress: Callable[[], None],
    on_end: Callable[[int], None] | None,
    *,
    weights_are_tensors: bool,
) -> RankGroup:
    """Raises ConfigError."""
    refuse_setting_if("node_rank", config.node_rank > 0 and "machines other than the first can only run `quire serve`")
    refuse_setting_if(
        "one_shot_sums",
        config.one_shot_sums
        and (config.tensor_parallel_size == 1 or chosen.device.type != "cuda")
        and "it only affects several GPUs (tensor_parallel_size); leave it out",
        config.one_shot_sums and find_spec("triton") is None and "needs Triton (pip install triton)",
    )
    if config.world_size == 1:
        return executor_class_or_default(config, SingleProcess)()
    check = check_pipeline_parallel if config.pipeline_parallel_size > 1 else check_tensor_parallel
    check(config, chosen, weights_are_tensors=weights_are_tensors)
    weights = None if config.weights is None else str(resolve_weights(config))
    settings: dict[str, Any] = {
        "model": str(path),
        "revision": None,
        "weights": weights,
        "device": chosen.device.type,
        "attention_backend": chosen.backend.name,
        "dtype": str(chosen.dtype).removeprefix("torch."),
        "kv_cache_dtype": kv_cache_dtype_name(config, chosen),
    }
    if chosen.device.type == "cuda" and not can_capture_decodes(chosen.backend, chosen.spec):
        settings["enforce_eager"] = True  # a trial may have decided this, and followers skip trials
    local = config.model_copy(update=settings)
    if config.pipeline_parallel_size > 1:
        return executor_class_or_default(config, Stages)(local, chosen, progress, on_end)
    return executor_class_or_default(config, SpmdRanks)(local, chosen, on_end)


def executor_class_or_default(config: EngineConfig, default: type[_ExecutorClass]) -> type[_ExecutorClass]:
    """Raises ConfigError."""
    if config.executor_cls is None:
        return default
    return import_class("executor_cls", config.executor_cls, default, "executor")


def check_tensor_parallel(config: EngineConfig, chosen: DevicePlan, *, weights_are_tensors: bool) -> None:
    """Raises ConfigError."""
    ranks = config.tensor_parallel_size
    device = chosen.device.type
    speculative = config.speculative_config
    refuse_setting_if(
        "tensor_parallel_size",
        device != "cpu"
        and config.nnodes > 1
        and "ranks on several machines (nnodes) compute only on CPUs so far; see --device",
        missing_gpus_reason(ranks, chosen.device) or chosen.spec.tensor_parallel_error(ranks),
        weights_are_tensors and "weights given as tensors reach only one rank; give them as a file",
    )
    if speculative is not None and speculative.uses_hidden_states and device == "cuda":
        refuse_setting_if(
            "speculative_config",
            f"{speculative.method!r} does not run on several GPUs (tensor_parallel_size) yet; a draft_model does",
        )


def missing_gpus_reason(ranks: int, device: torch.device) -> str | None:
    if is_other_device(device):
        return f"ranks compute only on CPUs and CUDA GPUs so far, not on {device.type}; see --device"
    if device.type != "cuda":
        return None
    num_visible = torch.cuda.device_count()
    if num_visible < ranks:
        return f"{ranks} ranks need {ranks} GPUs, and {num_visible} can be seen here (nvidia-smi, CUDA_VISIBLE_DEVICES)"
    if not torch.distributed.is_nccl_available():
        return f"this PyTorch ({torch.__version__}) was built without NCCL, which several GPUs need"
    return None


def check_pipeline_parallel(config: EngineConfig, chosen: DevicePlan, *, weights_are_tensors: bool) -> None:
    """Raises ConfigError."""
    stages = config.pipeline_parallel_size
    layers = chosen.spec.num_layers
    speculative = config.speculative_config
    refuse_setting_if(
        "pipeline_parallel_size",
        chosen.device.type != "cpu" and "stages compute only on CPUs so far; see --device",
        config.tensor_parallel_size > 1
        and "ranks that divide every layer (tensor_parallel_size) cannot be stages too yet; use one of the two",
        stages > layers and f"the model's {layers} layers cannot be divided among {stages} stages",
        chosen.spec.pipeline_parallel_error,
        speculative is not None
        and speculative.has_weights
        and f"speculative_config: {speculative.method!r} needs all layers in one process; ngram and suffix do not",
        weights_are_tensors and "weights given as tensors reach only one stage; give them as a file",
    )
