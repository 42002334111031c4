from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.kv_quantization import UNIT_KV_SCALES, KVScales

NORM_KINDS = ("heads", "whole", "centred", "after")
"""Numbered as in kernels/cpu/rope.cpp."""
PROJECTION_KINDS = ("queries", "keys", "all")
"""Numbered as in kernels/cpu/rope.cpp."""


@dataclass(frozen=True, slots=True)
class QKNormRopeParams:
    """RoPE (Su et al., 2021) and optional norms, with float32 weights."""

    head_dim: int
    cos_sin: Tensor | None
    """[max positions, D] float32: cosines, then sines. Pairs are (i, i + D/2) as in Llama checkpoints. None:
    no RoPE.
    """
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    kv_scales: KVScales = UNIT_KV_SCALES
    norm_kind: Literal["heads", "whole", "centred", "after"] = "heads"
    """heads: RMSNorm per head, weights [D]. whole: RMSNorm of all heads as one row, weights [H * D]. centred: LayerNorm
    per head without bias, weights [H * D]. after: like heads, but after RoPE.
    """
    q_scale: Tensor | None = None
    """[max positions] float32 factors of queries."""
    v_norm: Tensor | None = None
    """[D] float32 RMSNorm weights of value heads; only with norm_kind "heads"."""
    projections: Literal["all", "keys", "queries"] = "all"
    """Which heads the projection has. keys: q and k, where the raw k is also the value. queries: only q, because
    another layer has stored k and v.
    """

    @property
    def has_fused_kernel(self) -> bool:
        """True if there are only per-head norms and RoPE, which every backend computes in one kernel."""
        whole = self.q_scale is None and self.v_norm is None and self.projections == "all"
        return whole and (self.norm_kind == "heads" or (self.q_norm is None and self.k_norm is None))

    @property
    def num_kv_projections(self) -> int:
        """Projected heads per stored KV head, from 0 to 2."""
        return PROJECTION_KINDS.index(self.projections)

    def num_query_heads_of_width(self, width: int, kv_heads: int) -> int:
        return width // self.head_dim - self.num_kv_projections * kv_heads


def norm_and_rotate(x: Tensor, weight: Tensor | None, rope: QKNormRopeParams, positions: Tensor) -> Tensor:
    """x is [T, heads, D]."""
    if weight is not None and rope.norm_kind != "after":
        x = norm_heads(x, weight, rope)
    if rope.cos_sin is not None:
        cos, sin = rope.cos_sin[positions][:, None].chunk(2, dim=-1)
        x = _rotate_halves(x, cos, sin)
    return norm_heads(x, weight, rope) if weight is not None and rope.norm_kind == "after" else x


def norm_heads(x: Tensor, weight: Tensor, rope: QKNormRopeParams) -> Tensor:
    match rope.norm_kind:
        case "whole":
            return rms_norm(x.flatten(1), weight, rope.eps).view_as(x)
        case "centred":
            wide = x.float() if x.dtype != torch.float64 else x
            return (F.layer_norm(wide, x.shape[-1:], eps=rope.eps) * weight.view(-1, x.shape[-1])).to(x.dtype)
        case _:
            return rms_norm(x, weight, rope.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float() if x.dtype != torch.float64 else x
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x is [T, heads, D], cos and sin are [T, 1, D / 2] float32."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
