from __future__ import annotations

import math

from quire.engine.architecture.stream import EMBED_TOKENS_PER_LAYER
from quire.engine.checkpoint.kv_cache_plan import QUANTIZED_BITS, QUANTIZED_EMBEDDING_BITS, is_embedding_quantized
from quire.engine.common.config import EngineConfig
from quire.engine.layers.parameters import ParameterTable
from quire.kernels.backend import Backend


def weight_bytes_in_memory(table: ParameterTable, config: EngineConfig, backend: Backend, read_bytes: int) -> int:
    quantizes = config.online_quantization is not None or config.quantize_embedding
    return (
        weight_bytes_after_quantization(table, config) if backend.keeps_weights_quantized and quantizes else read_bytes
    )


def weight_bytes_after_quantization(table: ParameterTable, config: EngineConfig) -> int:
    bits, in_8_bits = 0.0, is_embedding_quantized(config.online_quantization, config.quantize_embedding)
    for name, each in table.items():
        element_bits = 8.0 * each.dtype.itemsize
        if name in (f"{EMBED_TOKENS_PER_LAYER}.weight", "model.embed_tokens.weight", "lm_head.weight"):
            element_bits = QUANTIZED_EMBEDDING_BITS if in_8_bits else element_bits
        elif config.online_quantization is not None and len(each.shape) > 1:
            element_bits = QUANTIZED_BITS[config.online_quantization]
        bits += math.prod(each.shape) * element_bits
    return round(bits / 8)
