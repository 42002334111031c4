from __future__ import annotations

import torch

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, refuse_setting_if
from quire.engine.families.base.model_config import ModelConfig
from quire.kernels.backend import Backend
from quire.kernels.backend_selection import select_backend
from quire.kernels.reference import ReferenceBackend

_MAX_TOKENS = 2**17
"""No encoder was trained for more tokens. Without this limit, per-position tables would grow with
config.json's claims.
"""


def determine_batch_invariance(
    config: EngineConfig, backend: Backend, device: torch.device, dtype: torch.dtype
) -> bool:
    batch_invariant, name = backend.is_batch_invariant(device, dtype), str(dtype).removeprefix("torch.")
    refuse_setting_if(
        "deterministic", config.deterministic and not batch_invariant and f"not promised for encoders in {name} here"
    )
    return batch_invariant


def check_encoder_config(config: EngineConfig) -> None:
    """Raises ConfigError."""
    for name, is_set, why in (
        ("tensor_parallel_size", config.tensor_parallel_size > 1, "encoders run in one process"),
        ("pipeline_parallel_size", config.pipeline_parallel_size > 1, "encoders run in one process"),
        ("enable_expert_parallel", config.enable_expert_parallel, "encoders have no experts"),
        ("one_shot_sums", config.one_shot_sums, "encoders run in one process"),
        ("weights_on_disk", config.weights_on_disk is not None, "encoders are always in memory"),
        ("block_size", config.block_size is not None, "encoders have no KV cache"),
        ("cpu_offload_gb", config.cpu_offload_gb > 0, "encoders are always on the device"),
        ("enable_lora", config.enable_lora, "encoders have no adapters"),
        ("quantization", config.quantization is not None, "encoders are not quantized"),
        ("kv_cache_dtype", config.kv_cache_dtype != "auto", "encoders have no KV cache"),
        ("kv_events_config", config.kv_events_config is not None, "encoders have no KV cache"),
        ("executor_cls", config.executor_cls is not None, "encoders have their own executor"),
        ("quantize_embedding", config.quantize_embedding, "encoders are not quantized"),
    ):
        refuse_setting_if(name, is_set and why)


def encoder_context_length(
    config: EngineConfig, model: ModelConfig, longest: int | None, trained_length: int | None
) -> int:
    """Raises ConfigError."""
    max_tokens = min(each for each in (model.max_position, longest, _MAX_TOKENS) if each is not None)
    if config.max_model_len is not None and config.max_model_len > max_tokens:
        wrong = f"max_model_len: {config.max_model_len} exceeds the model's {max_tokens} positions"
        raise ConfigError(wrong, param="max_model_len")
    return config.max_model_len or min(max_tokens, trained_length or max_tokens)


def choose_encoder_backend(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[Backend, str]:
    """On GPUs, chooses plain PyTorch, because nothing else has bidirectional attention so far. Raises ConfigError."""
    wanted = config.attention_backend
    if device.type != "cpu":
        if wanted not in ("auto", "reference"):
            wrong = f"attention_backend: {wanted} does not serve encoders; reference does"
            raise ConfigError(wrong, param="attention_backend")
        return ReferenceBackend(), f"encoders on {device.type} run on plain PyTorch"
    try:
        return select_backend(device, dtype, head_dim, wanted, activation_bits=config.activation_bits)
    except ValueError as error:
        raise ConfigError(f"attention_backend: {error}", param="attention_backend") from error
