from __future__ import annotations

from quire.engine.architecture.kv_cache_spec import PagedState
from quire.engine.checkpoint.kv_cache_plan import check_max_model_len
from quire.engine.common.config import EngineConfig
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.worker.device_memory import check_context_length, max_kv_tokens
from quire.engine.worker.device_plan import DevicePlan


def max_fitting_context_length(config: EngineConfig, model_config: ModelConfig, chosen: DevicePlan) -> int:
    """Returns an upper bound of the context length, before weights are loaded. Raises ConfigError if max_model_len is
    longer than the model or the KV cache allows.
    """
    check_max_model_len(model_config, config.max_model_len)
    state_itemsize, kv_itemsize = chosen.dtype.itemsize, chosen.kv_dtype.itemsize
    states = chosen.spec.kv_cache_specs
    token_bytes = sum(each.bytes_per_token(kv_itemsize, state_itemsize) for each in states)
    if config.max_model_len is None:
        max_tokens = max_kv_tokens(config, max(token_bytes, 1), chosen.device, chosen.backend.block_size)
        return min(model_config.max_position, max_tokens)
    # Layers with a window need few blocks, so the other layers may use all the memory.
    full_token_bytes = sum(
        each.bytes_per_token(kv_itemsize, state_itemsize)
        for each in states
        if isinstance(each, PagedState) and each.window is None
    )
    if full_token_bytes and (config.num_kv_blocks is None or not any(each.window for each in states)):
        check_context_length(config, full_token_bytes, chosen.device, chosen.backend.block_size)
    return config.max_model_len
