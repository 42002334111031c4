"""What the backends on flash-attn's kernels share: pages of 256 tokens, laid out [page, token, KV head, head_dim], and
every function beside attention: Triton's fused ones on a GPU, where Triton is installed."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from quire.kernels import reference
from quire.kernels.backend import AttentionMetadata, Backend, Rope
from quire.kernels.reference import argmax, draw, fuse_layers, pack_linear

__all__ = ["BLOCK_SIZE", "add_rms_norm", "argmax", "draw", "fuse_layers", "gelu_mul", "kv_cache_shape"]
__all__ += ["pack_linear", "rms_norm", "rope_store", "silu_mul", "store_kv"]

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


@cache
def _fused() -> ModuleType:
    try:
        from quire.kernels.gpu import triton_fused
    except ModuleNotFoundError:  # there is no Triton for this platform
        return reference
    return triton_fused


def _for(x: Tensor) -> Backend:
    return cast(Backend, _fused() if x.is_cuda else reference)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _for(x).rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _for(x).add_rms_norm(x, residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    return _for(gate_up).silu_mul(gate_up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    return _for(gate_up).gelu_mul(gate_up)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    _for(k).store_kv(k, v, k_cache, v_cache, slots)


def rope_store(qkv: Tensor, rope: Rope, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
    return _for(qkv).rope_store(qkv, rope, k_cache, v_cache, metadata)
