"""Checks what the C++ kernels of latent attention and key selection assume about their parameters."""

from __future__ import annotations

import torch

from quire.kernels.latent_params import KeySelectionParams, LatentNormRopeParams
from quire.kernels.parameters.latent import MAX_ROPE_DIM


def check_latent_params(latent: LatentNormRopeParams) -> None:
    """Raises TypeError or ValueError for unsupported parameters."""
    table = latent.norm_weight if latent.cos_sin is None else latent.cos_sin
    if latent.norm_weight.dtype != torch.float32 or table.dtype != torch.float32:
        raise TypeError("the norm and the rotation of latents must be float32")
    size, rotated = latent.latent_and_rope_dims
    if size % 2 or not 2 <= rotated <= MAX_ROPE_DIM or not table.is_contiguous():
        raise ValueError(f"expected an even latent with 2 to {MAX_ROPE_DIM} RoPE dimensions, got {size}, {rotated}")


def check_key_selection_params(params: KeySelectionParams, dim: int) -> None:
    """Raises TypeError or ValueError for unsupported parameters."""
    tensors = (params.norm_weight, params.norm_bias, params.cos_sin)
    if any(each.dtype != torch.float32 or not each.is_contiguous() for each in tensors):
        raise TypeError("the norm and the rotation of index keys must be float32 and contiguous")
    rotated = params.cos_sin.shape[1]
    if dim % 2 or not 2 <= rotated <= min(dim, MAX_ROPE_DIM):
        raise ValueError(f"expected an even index key with 2 to {MAX_ROPE_DIM} RoPE dimensions, got {dim}, {rotated}")
