"""A key of MLA (DeepSeek-V2, 2024) is a latent and a rotated part for all heads: L + R elements, whose first L are the
value. Queries are absorbed into latent space before attention, and the output is expanded afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.kv_quantization import UNIT_KV_SCALES, KVScales
from quire.kernels.qk_norm_rope import rms_norm


@dataclass(frozen=True, slots=True)
class LatentNormRopeParams:
    norm_weight: Tensor
    """[L] float32."""
    eps: float
    cos_sin: Tensor | None
    """[max positions, R] float32: cosines, then sines. None for NoPE."""
    is_interleaved: bool
    """If True, rotated pairs are neighbors, as in DeepSeek's checkpoints. Otherwise they are (i, i + R/2)."""
    kv_scales: KVScales = UNIT_KV_SCALES
    """Scales of float8 pages. The key scale is also the value scale."""
    unrotated_dim: int = 0
    """R if `cos_sin` is None, otherwise unused."""

    @property
    def latent_and_rope_dims(self) -> tuple[int, int]:
        return len(self.norm_weight), self.unrotated_dim if self.cos_sin is None else self.cos_sin.shape[1]


def rotate_queries(q: Tensor, latent: LatentNormRopeParams, positions: Tensor) -> Tensor:
    """Rotate the last R elements of q [T, H, any + R]."""
    before, turned = q.split((q.shape[-1] - latent.latent_and_rope_dims[1], latent.latent_and_rope_dims[1]), dim=-1)
    return torch.cat((before, _apply_rope(turned, latent, positions)), dim=-1)


def compute_latent_key(kv: Tensor, latent: LatentNormRopeParams, positions: Tensor) -> Tensor:
    """Norm and rotate kv [T, L + R] to keys [T, 1, L + R]."""
    compressed, turned = kv.unsqueeze(1).split(latent.latent_and_rope_dims, dim=-1)
    normed = rms_norm(compressed, latent.norm_weight, latent.eps)
    return torch.cat((normed, _apply_rope(turned, latent, positions)), dim=-1)


def _apply_rope(x: Tensor, latent: LatentNormRopeParams, positions: Tensor) -> Tensor:
    return x if latent.cos_sin is None else rotate_pairs(x, latent.cos_sin[positions], latent.is_interleaved)


def rotate_pairs(x: Tensor, cos_sin: Tensor, is_interleaved: bool) -> Tensor:
    """Rotate x [T, heads, R] by cos_sin [T, R]. Results are in half layout, even for interleaved pairs."""
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    first, second = (x[..., ::2], x[..., 1::2]) if is_interleaved else x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


@dataclass(frozen=True, slots=True)
class KeySelectionParams:
    """The indexer of DeepSeek Sparse Attention (DSA: DeepSeek-V3.2, 2025). A token has one index key, and some index
    queries with a weight each. A key's score is the weighted sum of its products with the queries, where negative
    products count as 0. DSA's constant factors of scores are left out, because they do not change the order.
    """

    norm_weight: Tensor
    """[D] float32 weights of the keys' LayerNorm."""
    norm_bias: Tensor
    """[D] float32."""
    eps: float
    cos_sin: Tensor
    """[max positions, R] float32: cosines, then sines, for the first R numbers of queries and keys."""
    is_interleaved: bool
    """If True, rotated pairs are neighbors. Otherwise they are (i, i + R/2)."""
    top_k: int


def compute_index_key(k: Tensor, params: KeySelectionParams, positions: Tensor) -> Tensor:
    """Norm and rotate [T, D] to index keys [T, 1, D]."""
    wide = k.float() if k.dtype != torch.float64 else k
    weight, bias = params.norm_weight.to(wide.dtype), params.norm_bias.to(wide.dtype)
    normed = F.layer_norm(wide, wide.shape[-1:], weight, bias, params.eps).to(k.dtype)
    return rotate_index_heads(normed.unsqueeze(1), params, positions)


def rotate_index_heads(x: Tensor, params: KeySelectionParams, positions: Tensor) -> Tensor:
    """Rotate index queries or keys [T, heads, D]."""
    size = params.cos_sin.shape[1]
    turned = rotate_pairs(x[..., :size], params.cos_sin[positions], params.is_interleaved)
    return torch.cat((turned, x[..., size:]), dim=-1)
