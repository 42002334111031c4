"""How much memory the KV cache may take on this device, and the cache itself."""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.models.decoder import DecoderSpec, KVCache
from engine.plan import GIB, available_host_bytes, device_kv_budget, host_kv_budget
from kernels.attention import Backend


def kv_budget(config: EngineConfig, device: torch.device) -> int:
    """Bytes for the KV cache, with the weights already loaded."""
    if config.kv_cache_memory is not None:
        return int(config.kv_cache_memory * GIB)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return device_kv_budget(free, total, config.gpu_memory_utilization)
    return host_kv_budget(available_host_bytes())


def allocate_kv_cache(
    spec: DecoderSpec, backend: Backend, num_blocks: int, *, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Key and value pages of every layer. Their content is undefined; on Linux, untouched pages take no memory."""
    shape = backend.kv_cache_shape(num_blocks, spec.num_kv_heads, spec.head_dim, dtype)
    return [
        (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
        for _ in range(spec.num_layers)
    ]
