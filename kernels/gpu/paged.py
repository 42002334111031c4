"""What the backends on flash-attn's kernels share: pages of 256 tokens, laid out [page, token, KV head, head_dim], and
everything beside attention: Triton's fused kernels on a GPU, where Triton is installed."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata, Backend, Rope
from quire.kernels.reference import Reference

_DTYPES = (torch.float16, torch.bfloat16)
_MOST_HEAD_DIM = 256


class FlashPages(Reference):
    block_size = 256
    """flash-attn 2 takes multiples of 256 alone."""

    def __init__(self, *, deterministic: bool = False) -> None:
        super().__init__(deterministic=deterministic)
        self._plain: Backend = Reference()
        self._fused = _fused()

    def cannot_serve(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False
    ) -> str | None:
        """What flash-attn 2's kernels ask of a model and a GPU, whoever built them."""
        if device.type != "cuda":
            return f"runs on NVIDIA GPUs, not on {device.type}"
        if dtype not in _DTYPES:
            return f"takes float16 and bfloat16, not {dtype}"
        if head_dim % 8 or head_dim > _MOST_HEAD_DIM:
            return f"takes head sizes up to {_MOST_HEAD_DIM} in steps of 8, not {head_dim}"
        major, minor = torch.cuda.get_device_capability(device)
        return None if major >= 8 else f"needs compute capability 8.0, this GPU has {major}.{minor}"

    def _for(self, x: Tensor) -> Backend:
        return self._fused if x.is_cuda else self._plain

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._for(x).rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._for(x).add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._for(gate_up).silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._for(gate_up).gelu_mul(gate_up)

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        self._for(k).store_kv(k, v, k_cache, v_cache, slots)

    def rope_store(
        self, qkv: Tensor, rope: Rope, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        return self._for(qkv).rope_store(qkv, rope, k_cache, v_cache, metadata)


def _fused() -> Backend:
    """What computes beside attention on a GPU."""
    try:
        from quire.kernels.gpu.triton_paged import Triton
    except ModuleNotFoundError:  # there is no Triton for this platform
        return Reference()
    return Triton()
