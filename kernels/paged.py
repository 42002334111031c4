"""What the backends on flash-attn's kernels share: pages of 256 tokens, laid out [page, token, KV head, head_dim], and
every function beside attention."""

from __future__ import annotations

import torch

from kernels.reference import add_rms_norm, argmax, pack_linear, rms_norm, rope_store, silu_mul, store_kv

__all__ = [
    "BLOCK_SIZE",
    "add_rms_norm",
    "argmax",
    "kv_cache_shape",
    "pack_linear",
    "rms_norm",
    "rope_store",
    "silu_mul",
]
__all__ += ["store_kv"]

BLOCK_SIZE = 256
"""flash-attn 2 takes multiples of 256 alone."""
_DTYPES = (torch.float16, torch.bfloat16)
_MOST_HEAD_DIM = 256


def kv_cache_shape(num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    return (num_blocks, BLOCK_SIZE, kv_heads, head_dim)


def flash_cannot_serve(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """What flash-attn 2's kernels ask of a model and a GPU, wherever they come from."""
    if device.type != "cuda":
        return f"runs on NVIDIA GPUs, not on {device.type}"
    if dtype not in _DTYPES:
        return f"takes float16 and bfloat16, not {dtype}"
    if head_dim % 8 or head_dim > _MOST_HEAD_DIM:
        return f"takes head sizes up to {_MOST_HEAD_DIM} in steps of 8, not {head_dim}"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"needs compute capability 8.0, this GPU has {major}.{minor}"
