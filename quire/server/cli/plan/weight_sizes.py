from __future__ import annotations

from quire.engine.architecture.kv_cache_spec import KVElementSizes
from quire.engine.checkpoint.kv_cache_plan import (
    DTYPE_BYTES,
    KV_CODE_SCALE_BYTES,
    QUANTIZED_BITS,
    QUANTIZED_EMBEDDING_BITS,
)
from quire.engine.checkpoint.sizes.model_sizes import ModelSizes
from quire.engine.checkpoint.tensor_headers import CheckpointSize
from quire.engine.common.config import EngineConfig
from quire.server.cli.plan.machine import Machine

COMPRESSION_SAVING = 0.24
"""12-bit compression of linears saves a quarter, minus a few uncompressed weights (kernels/cpu/compress12.h)."""


def total_and_device_weight_bytes(
    sizes: ModelSizes,
    machine: Machine,
    dtype: str,
    stored: CheckpointSize | None,
    quantized: str | None,
    *,
    in_8_bits: bool,
    expanded: bool = False,
) -> tuple[int, int]:
    """`in_8_bits`: the embedding has 8 bits too. If `expanded` (Machine.expands_weights), `quantized` must be None."""
    width = DTYPE_BYTES[dtype]
    weights = (
        _weight_bytes_from_sizes(sizes, dtype) if stored is None else stored.num_floats * width + stored.packed_bytes
    )
    if expanded and sizes.quantization:
        weights = sizes.num_parameters * width
    if quantized is not None:
        weights = round((sizes.num_parameters - sizes.embedding_parameters) * QUANTIZED_BITS[quantized] / 8)
        weights += sizes.embedding_parameters * width
    if in_8_bits:
        weights -= round(sizes.embedding_parameters * (width - QUANTIZED_EMBEDDING_BITS / 8))
    held = weights
    if stored is not None and quantized is None and not expanded:
        held += stored.gpu_expansion if machine.gpu else stored.cpu_expansion
    on_device = held // machine.count + _tied_head_copy_bytes(
        sizes, machine, width, _quantized_embedding_bits(stored, in_8_bits)
    )
    if quantized is None and machine.compresses_weights and dtype == "bfloat16" and not sizes.quantization:
        # The embedding table is not compressed.
        on_device -= round((on_device - sizes.head_parameters * width // machine.count) * COMPRESSION_SAVING)
    return weights, on_device


def device_linear_bytes(numbers: int, sizes: ModelSizes, machine: Machine, dtype: str, quantized: str | None) -> int:
    bits = QUANTIZED_BITS[quantized] if quantized is not None else sizes.bits_per_weight or 8.0 * DTYPE_BYTES[dtype]
    if quantized is None and not sizes.bits_per_weight and machine.compresses_weights and dtype == "bfloat16":
        bits *= 1 - COMPRESSION_SAVING
    return round(numbers * bits / 8) // machine.count


def _weight_bytes_from_sizes(sizes: ModelSizes, dtype: str) -> int:
    return round(sizes.num_parameters * DTYPE_BYTES[dtype] * sizes.weight_ratio)


def _quantized_embedding_bits(stored: CheckpointSize | None, in_8_bits: bool) -> float | None:
    """Returns None if the embedding is not quantized."""
    if in_8_bits:
        return QUANTIZED_EMBEDDING_BITS
    return None if stored is None else stored.embedding_bits


def _tied_head_copy_bytes(sizes: ModelSizes, machine: Machine, width: int, bits: float | None) -> int:
    """Bytes per device. The first and the last stage of a pipeline both store the head, and CPU kernels pack a copy of
    an unquantized head. `bits`: per number, None if unquantized.
    """
    tied = sizes.embedding_parameters < 2 * sizes.head_parameters
    if not tied or (machine.stages == 1 and (bits is not None or machine.gpu)):
        return 0
    return round(sizes.head_parameters * (width if bits is None else bits / 8)) // machine.count


def kv_token_bytes(sizes: ModelSizes, element_sizes: KVElementSizes) -> int:
    return sum(each.bytes_per_token(element_sizes) for each in sizes.cache_specs)


def kv_element_sizes(dtype: str, kv_cache_dtype: str) -> KVElementSizes:
    width = DTYPE_BYTES[dtype]
    kv_width = width if kv_cache_dtype == "auto" else DTYPE_BYTES.get(kv_cache_dtype, 1)
    return KVElementSizes(kv_width, width, KV_CODE_SCALE_BYTES.get(kv_cache_dtype, 0))


def resolve_dtypes(sizes: ModelSizes, machine: Machine, config: EngineConfig) -> tuple[str, str]:
    """Returns the dtypes of the model and of the KV cache that worker/device_plan.py would choose. "auto" for the KV
    cache means the model's dtype.
    """
    dtype, kv_cache_dtype = config.dtype, config.kv_cache_dtype
    if dtype == "float16" and not machine.gpu and config.attention_backend in ("auto", "cpu"):
        return "bfloat16", kv_cache_dtype
    if dtype != "auto":
        return dtype, kv_cache_dtype
    if sizes.uses_float32_activations and not machine.gpu:
        return "float32", "bfloat16" if kv_cache_dtype == "auto" else kv_cache_dtype
    name = sizes.dtype if sizes.dtype in DTYPE_BYTES else "bfloat16"
    if name == ("float32" if machine.gpu else "float16") and machine.bf16:
        return "bfloat16", kv_cache_dtype
    return "float16" if name == "bfloat16" and not machine.bf16 else name, kv_cache_dtype
