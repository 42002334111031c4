"""Under MLA (DeepSeek-V2, 2024) a token has one latent, from which keys and values of all heads derive, and one rotated
key for all heads. Together they are one key of L + R numbers; its first L are the value. Queries are absorbed into
latent space before attention, and the output is brought out after.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.kv_quantization import UNIT_KV_SCALES, KVScales
from quire.kernels.qk_norm_rope import rms_norm


@dataclass(frozen=True, slots=True)
class LatentNormRopeParams:
    norm_weight: Tensor
    """[L] float32."""
    eps: float
    cos_sin: Tensor | None
    """[max positions, R] float32: cosines, then sines. None: NoPE."""
    is_interleaved: bool
    """Rotated pairs are neighbors, as in DeepSeek's checkpoints, not (i, i + R/2)."""
    kv_scales: KVScales = UNIT_KV_SCALES
    """For float8 pages; the key scale is also the value scale."""
    unrotated_dim: int = 0
    """R if `cos_sin` is None."""

    @property
    def latent_and_rope_dims(self) -> tuple[int, int]:
        """(L, R)"""
        return len(self.norm_weight), self.unrotated_dim if self.cos_sin is None else self.cos_sin.shape[1]


def rotate_queries(q: Tensor, latent: LatentNormRopeParams, positions: Tensor) -> Tensor:
    """Rotates the last R numbers of q [T, H, any + R]."""
    before, turned = q.split((q.shape[-1] - latent.latent_and_rope_dims[1], latent.latent_and_rope_dims[1]), dim=-1)
    return torch.cat((before, _apply_rope(turned, latent, positions)), dim=-1)


def compute_latent_key(kv: Tensor, latent: LatentNormRopeParams, positions: Tensor) -> Tensor:
    """kv [T, L + R] to [T, 1, L + R]."""
    compressed, turned = kv.unsqueeze(1).split(latent.latent_and_rope_dims, dim=-1)
    normed = rms_norm(compressed, latent.norm_weight, latent.eps)
    return torch.cat((normed, _apply_rope(turned, latent, positions)), dim=-1)


def _apply_rope(x: Tensor, latent: LatentNormRopeParams, positions: Tensor) -> Tensor:
    """Without RoPE, x."""
    return x if latent.cos_sin is None else rotate_pairs(x, latent.cos_sin[positions], latent.is_interleaved)


def rotate_pairs(x: Tensor, cos_sin: Tensor, is_interleaved: bool) -> Tensor:
    """x [T, heads, R] by cos_sin [T, R]. Returns half layout, even for interleaved pairs."""
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    first, second = (x[..., ::2], x[..., 1::2]) if is_interleaved else x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
