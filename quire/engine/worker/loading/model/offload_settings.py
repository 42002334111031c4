from __future__ import annotations

import os
import re

from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.moe import MoELayerSpec
from quire.engine.architecture.shared_transformer import SharedTransformerSpec
from quire.engine.checkpoint.tensor_headers import LAYER_PATTERN, ROUTED_EXPERT_PATTERN
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import refuse_setting_if
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.worker.device_plan import DevicePlan
from quire.kernels.gpu.other_devices import is_other_device

DISK_PARAM = "weights_on_disk"
GPU_PARAM = "cpu_offload_gb"


def check_offload(config: EngineConfig, model_config: ModelConfig, chosen: DevicePlan) -> None:
    """Raises ConfigError."""
    experts, device = bool(chosen.spec.sublayers_of_kind(MoELayerSpec)), chosen.device.type
    by_class = model_config.transformers_config is not None and "the model's layers are computed by transformers' class"
    shared_weights = bool(chosen.spec.sublayers_of_kind(SharedTransformerSpec)) and "layers of the model share weights"
    if config.cpu_offload_gb:
        refuse_setting_if(
            GPU_PARAM,
            device == "cpu" and "it is only for GPUs; for CPUs use weights_on_disk",
            is_other_device(chosen.device) and f"layers are streamed only to CUDA GPUs so far, not to {device}",
            by_class,
            shared_weights,
        )
    if config.weights_on_disk is None:
        is_set = config.weights_in_memory is not None
        why = "is how many GiB of the weights on disk (weights_on_disk) are kept in memory"
        refuse_setting_if("weights_in_memory", is_set and why)
        return
    refuse_setting_if(
        DISK_PARAM,
        device != "cpu" and "it is only for CPUs; for GPUs use cpu_offload_gb",
        by_class,
        not experts and shared_weights,
        not hasattr(os, "posix_fallocate") and "this system cannot reserve disk space for a file; it needs Linux",
    )


def disk_tensor_name_pattern(config: EngineConfig, spec: DecoderSpec) -> re.Pattern[str] | None:
    if config.weights_on_disk is None:
        return None
    return ROUTED_EXPERT_PATTERN if spec.sublayers_of_kind(MoELayerSpec) else LAYER_PATTERN
