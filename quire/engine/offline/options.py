"""EngineConfig's fields as types for editors and type checkers. Add options to EngineConfig;
tests/engine/offline/test_options.py reports missing ones.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, TypeVar

from quire.engine.common.config import (
    CheckpointQuantization,
    Dtype,
    EngineConfig,
    KVEventsConfig,
    OnlineQuantization,
    SpeculativeConfig,
)
from quire.engine.common.errors import ConfigError
from quire.engine.common.speculative_keys import ignored_speculative_keys_reason
from quire.engine.settings.settings_reader import load_settings
from quire.engine.unsupported_options import (
    flag_aliases,
    redundant_option_reason,
    redundant_vllm_value_reason,
    summarize_redundant,
)

logger = logging.getLogger("quire.engine.offline.options")
_F = TypeVar("_F", bound=Callable[..., None])


class EngineOptions(TypedDict, total=False):
    tokenizer: str | None
    chat_template: str | None
    adapt_conversations: Literal["auto", "off"]
    skip_tokenizer_init: bool
    revision: str | None
    weights: str | None
    model_impl: Literal["auto", "quire", "transformers"]
    hf_overrides: dict[str, Any] | str | None
    generation_config: str
    override_generation_config: dict[str, Any] | str | None
    load_format: Literal["auto", "dummy"]
    dtype: Dtype
    quantization: Literal[OnlineQuantization, CheckpointQuantization] | None
    quantize_embedding: bool | None
    device: Literal["auto", "cpu", "cuda", "mps", "xpu"]
    attention_backend: str
    deterministic: bool
    enforce_eager: bool
    warmup_seconds: float
    max_model_len: int | str | None
    rope_context: int | str | None
    max_num_seqs: int
    max_num_batched_tokens: int | str | None
    long_prefill_token_threshold: int | None
    gpu_memory_utilization: float
    kv_cache_dtype: Literal["auto", "bfloat16", "int8", "fp8", "fp8_e4m3"]
    activation_bits: Literal["auto", "8", "16"]
    kv_cache_memory: float | None
    num_kv_blocks: int | None
    state_memory: float | None
    snapshot_tokens: int
    enable_prefix_caching: bool
    kv_offload_memory: float | None
    kv_offload_dir: str | None
    kv_offload_disk: float | None
    kv_offload_tier: str | None
    runner: Literal["auto", "generate", "pooling"]
    pooling_type: Literal["auto", "last", "mean", "cls", "none"]
    classifier_from_token: Sequence[str]
    speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None
    kv_events_config: KVEventsConfig | Mapping[str, Any] | str | None
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int | None
    tensor_parallel_size: int
    decode_context_parallel_size: int
    enable_expert_parallel: bool
    one_shot_sums: bool
    pipeline_parallel_size: int
    data_parallel_size: int
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    nodes_timeout: float
    threads: int | None
    niceness: int
    engine_heartbeat_timeout: float
    engine_step_timeout: float
    max_engine_starts: int
    scheduling_policy: Literal["priority", "fcfs"]
    scheduler_cls: str | None
    executor_cls: str | None
    disable_sliding_window: bool
    block_size: int | None
    weights_on_disk: str | None
    weights_in_memory: float | None
    cpu_offload_gb: float
    seed: int


class EngineArgsLike(Protocol):
    """Interface of `quire.EngineArgs`."""

    model: str | Path | None
    options: EngineOptions


def with_config_docs(init: _F) -> _F:
    """Decorate `__init__(self, model, **options)`, so that signature and help show EngineConfig's fields."""
    fields = {name: field for name, field in EngineConfig.model_fields.items() if name != "model"}
    own_parameters = [each for each in inspect.signature(init).parameters.values() if each.kind is not each.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.get_default(call_default_factory=True),
            annotation=EngineConfig.__annotations__[name],
        )
        for name, field in fields.items()
    ]
    init.__signature__ = inspect.Signature([*own_parameters, *options], return_annotation=None)  # type: ignore[attr-defined]
    listing = "\n".join(f"    {name}: {field.description}" for name, field in fields.items())
    init.__doc__ = f"{init.__doc__}\n\n{listing}\n"
    return init


def make_engine_config(model: str | Path | None, options: EngineOptions) -> EngineConfig:
    """Logs and drops vLLM options that change nothing. Raises ConfigError with a remedy."""
    if model is not None and not isinstance(model, str | Path):
        raise ConfigError(f"model: must be a folder, a file or a hub id, got {model!r}")
    config_values: dict[str, Any] = {} if model is None else {"model": str(model)}
    reasons_by_option: dict[str, str] = {}
    for name, value in options.items():
        ours = flag_aliases().get(name.replace("_", "-"), name).replace("-", "_")
        if name not in EngineConfig.model_fields and ours in EngineConfig.model_fields and ours not in options:
            config_values[ours] = value
        elif name in EngineConfig.model_fields and (why := redundant_vllm_value_reason(name, value)):
            reasons_by_option[name] = why
        elif name in EngineConfig.model_fields or not (why := redundant_option_reason(name, value)):
            config_values[name] = value
        elif value is not None and value is not False:
            reasons_by_option[name] = why
    if why := ignored_speculative_keys_reason(options.get("speculative_config")):
        reasons_by_option["speculative_config"] = why
    if reasons_by_option:
        logger.warning(summarize_redundant(reasons_by_option))
    return load_settings(EngineConfig, config_values, origin="argument {key}")
