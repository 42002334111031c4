"""MLA of whole prompts with keys and values of all heads. This multiplies less than the absorbed form but rounds
differently, so a row's bits depend on how the prompt is divided into chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.mla.triton_expanded import attend_expanded
from quire.kernels.gpu.triton_launch_sizes import AttentionTiles, is_hopper, next_power_of_2


def run_expanded_attention(
    q: Tensor, halves: tuple[Tensor, Tensor], cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
) -> Tensor:
    """halves: the two parts of kv_b_proj. The first, [H, L, P], makes the unrotated parts of keys; the second, [H, V,
    L], makes values.
    """
    q = q.contiguous()
    tokens, heads, width = q.shape
    absorb, expand = halves
    (values, size), plain = expand.shape[1:], absorb.shape[2]
    rotated, stored_latents = width - plain, cache.view(-1, cache.shape[-1])[metadata.slot_mapping]
    low, turned = stored_latents.split((size, rotated), dim=1)
    k = torch.matmul(low, absorb)
    v = torch.matmul(low, expand.transpose(1, 2))
    if next_power_of_2(plain) != plain or next_power_of_2(rotated) != rotated or min(plain, rotated) < 16:
        # Joined parts fill power-of-two tiles better.
        k = torch.cat((k, turned[None].expand(heads, -1, -1)), dim=2)
        plain = width
        rotated = 0
    out, seqs = q.new_empty((tokens, heads * values)), len(metadata.context_lens)
    padded = max(16, next_power_of_2(plain)), max(16, next_power_of_2(values))
    tiles = choose_expanded_tiles(max(padded), q.dtype, hopper=is_hopper(q.device.index))
    sizes = (heads, plain, padded[0], rotated, values, padded[1], stored_latents.shape[1], tiles.block_m, tiles.block_n)
    grid = (heads, tokens // tiles.block_m + seqs)
    compiled = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    attend_expanded[grid](out, q, k, turned, v, metadata.query_start, tokens, seqs, softmax.scale, *sizes, **compiled)
    return out


def choose_expanded_tiles(widest: int, dtype: torch.dtype, *, hopper: bool) -> AttentionTiles:
    """widest: larger size of key and value. Measured on an H100. Without `hopper`, tiles fit in a consumer GPU's 99 KB
    of shared memory.
    """
    if dtype == torch.float32:  # no tensor cores
        return AttentionTiles(16, 16, 4, 1)
    if hopper:
        return AttentionTiles(128, 64, 8, 3 if widest <= 128 else 2)
    return AttentionTiles(64, 32, 4 if widest <= 128 else 8, 2)
