from __future__ import annotations

from quire.engine.architecture.kv_cache_spec import KVElementSizes
from quire.engine.checkpoint.kv_cache_plan import check_max_model_len
from quire.engine.common.config import EngineConfig
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.worker.device_memory import check_context_length, max_kv_tokens
from quire.engine.worker.device_plan import DevicePlan


def max_fitting_context_length(config: EngineConfig, model_config: ModelConfig, chosen: DevicePlan) -> int:
    """Raises ConfigError."""
    check_max_model_len(model_config, config.max_model_len)
    element_sizes = KVElementSizes(chosen.kv_dtype.itemsize, chosen.dtype.itemsize)
    specs = chosen.spec.kv_cache_specs
    if config.max_model_len is None:
        token_bytes = sum(each.bytes_per_token(element_sizes) for each in specs)
        max_tokens = max_kv_tokens(config, max(token_bytes, 1), chosen.device, chosen.backend.block_size)
        return min(model_config.max_position, max_tokens)
    if config.num_kv_blocks is None or not any(each.window for each in specs):
        check_context_length(config, specs, element_sizes, chosen.device, chosen.backend.block_size)
    return config.max_model_len
