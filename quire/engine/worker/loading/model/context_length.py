from __future__ import annotations

from quire.engine.architecture.kv_cache_spec import KVElementSizes
from quire.engine.checkpoint.kv_cache_plan import check_max_model_len
from quire.engine.common.config import EngineConfig
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.worker.device_memory import ContextMemory
from quire.engine.worker.device_plan import DevicePlan


def max_fitting_context_length(config: EngineConfig, model_config: ModelConfig, chosen: DevicePlan) -> int:
    """Raises ConfigError."""
    check_max_model_len(model_config, config.max_model_len)
    element_sizes = KVElementSizes(chosen.kv_dtype.itemsize, chosen.dtype.itemsize)
    block_size = chosen.backend.block_size
    memory = ContextMemory(config, chosen.spec.kv_cache_specs, element_sizes, chosen.device, block_size)
    if config.max_model_len is None:
        longest = memory.longest_context(model_config.max_position)
        return max(longest, min(block_size, model_config.max_position))
    memory.check(config.max_model_len)
    return config.max_model_len
