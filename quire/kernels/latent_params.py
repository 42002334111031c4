"""Latent attention (MLA: DeepSeek-V2, 2024): what a token keeps, in plain PyTorch.

A token keeps one latent, which keys and values of all heads are made of, and one rotated key, which all heads share.
In its page they lie side by side as one key of one head, of L + R numbers; the value is the first L of these. Queries
are brought into the latents' space (absorbed) before they meet keys, and what attention gives is brought out of it
behind, so that nothing is ever made of the latents of a context.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.kv_quantization import UNIT_KV_SCALES, KVScales
from quire.kernels.qk_norm_rope import rms_norm


@dataclass(frozen=True, slots=True)
class LatentNormRopeParams:
    """What happens to a latent and to the rotated numbers, before they are stored."""

    norm_weight: Tensor
    """[L] float32: weights of the latent's RMSNorm."""
    eps: float
    cos_sin: Tensor
    """[most positions, R] float32: cosines in the first half of a row, sines in the second."""
    is_interleaved: bool
    """Pairs that are rotated are neighbours, as DeepSeek stores them; else one number of each half."""
    kv_scales: KVScales = UNIT_KV_SCALES
    """Of pages that hold 8-bit floats; that of keys is that of values too."""

    @property
    def latent_and_rope_dims(self) -> tuple[int, int]:
        """(L, R)"""
        return len(self.norm_weight), self.cos_sin.shape[1]


def rotate_queries(q: Tensor, latent: LatentNormRopeParams, positions: Tensor) -> Tensor:
    """[T, H, any + R], of which the last R numbers are rotated."""
    before, turned = q.split((q.shape[-1] - latent.latent_and_rope_dims[1], latent.latent_and_rope_dims[1]), dim=-1)
    return torch.cat((before, _apply_rope(turned, latent, positions)), dim=-1)


def compute_latent_key(kv: Tensor, latent: LatentNormRopeParams, positions: Tensor) -> Tensor:
    """The key [T, 1, L + R] of kv [T, L + R]."""
    compressed, turned = kv.unsqueeze(1).split(latent.latent_and_rope_dims, dim=-1)
    normed = rms_norm(compressed, latent.norm_weight, latent.eps)
    return torch.cat((normed, _apply_rope(turned, latent, positions)), dim=-1)


def _apply_rope(x: Tensor, latent: LatentNormRopeParams, positions: Tensor) -> Tensor:
    """x [T, heads, R]; the results stand in halves, however pairs did."""
    cos, sin = latent.cos_sin[positions][:, None].chunk(2, dim=-1)
    first, second = (x[..., ::2], x[..., 1::2]) if latent.is_interleaved else x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
