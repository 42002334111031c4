"""Attention over pages of latents by the kernels of triton_latents.py, in the absorbed form: decodes, whose keys are
split to fill the GPU, and prompts."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.attention.own import Own
from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.latents.triton_latents import attend_latent_splits, attend_latents
from quire.kernels.gpu.ranks.divided import made_for
from quire.kernels.gpu.triton_attention import reduce_even, reduce_fixed
from quire.kernels.gpu.triton_codes import held_in
from quire.kernels.gpu.triton_sizes import (
    FIXED_SPLIT,
    MOST_PARTS,
    MOST_SPLITS,
    Tiles,
    cdiv,
    even_splits,
    power_of_2,
    wanted_programs,
)
from quire.kernels.kv_codes import KV_CODES
from quire.kernels.softmax import Softmax

_MANY = 32
"""Rows of a tile where a sequence has so many."""


def attention(
    q: Tensor, cache: Tensor, metadata: AttentionMetadata, softmax: Softmax, *, fixed: bool, own: Own | None = None
) -> Tensor:
    """`Operations.paged_attention` with Softmax.values, of a step that has no parts: q [T, H, L + R], pages [P, page
    size, 1, L + R] of any power-of-two size. fixed, own: as paged_attention of triton_paged.py has them."""
    assert softmax.values is not None
    q, (tokens, heads, dim), values, page = q.contiguous(), q.shape, softmax.values, cache.shape[1]
    rank, ranks = (0, 1) if own is None else (own.rank, own.count)
    out, seqs = made_for(q, values, own), len(metadata.context_lens)
    one_token, longest = metadata.max_query_len == 1, metadata.max_context_len
    longest = longest if own is None else own.most(longest)
    tiles = choose_tiles(heads * metadata.max_query_len, q.dtype, narrow=fixed or cache.dtype in KV_CODES, fixed=fixed)
    count = seqs * cdiv(heads, tiles.block_m) if one_token else tokens * heads // tiles.block_m + seqs
    split = FIXED_SPLIT if fixed else 0
    if split:
        splits = cdiv(longest, split)
        programs = min(splits, wanted_programs(count, q.device.index))
    else:
        splits = programs = even_splits(wanted_programs(count, q.device.index), longest, one_token)
    if tokens * heads * splits * values > MOST_PARTS:
        programs = 1
    held, codes, scales = held_in(cache)
    inputs = (q, codes, scales, metadata.query_start, metadata.context_lens, metadata.block_table)
    strides = (metadata.block_table.stride(0), cache.stride(0), seqs)
    key_scale = softmax.kv_scales.key
    rotated = dim - values
    sizes = (heads, values, power_of_2(values), rotated, max(16, power_of_2(rotated)), page)
    kinds = (tiles.block_m, tiles.block_n, one_token, split, held, ranks)
    compiled = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    rules = (softmax.scale * key_scale, key_scale, rank)
    if programs == 1:
        attend_latents[count,](out, *inputs, *strides, *rules, *sizes, *kinds, **compiled)
        return out
    weighted = torch.empty((tokens * heads, splits, values), dtype=torch.float32, device=q.device)
    peaks, totals = torch.empty((2, tokens * heads, splits), dtype=torch.float32, device=q.device)
    parts = (weighted, peaks, totals)
    looped = programs < splits
    attend_latent_splits[count, programs](*parts, *inputs, *strides, splits, *rules, *sizes, *kinds, looped, **compiled)
    padded = sizes[2]
    if fixed:
        kept = (heads, values, padded, page, False, split, ranks, False)
        reduce_fixed[tokens * heads,](out, q, *parts, metadata.positions, splits, 0, rank, *kept, num_warps=1)
    else:
        kept_even = (heads, values, padded, MOST_SPLITS, ranks, False)
        reduce_even[tokens * heads, 1](out, q, *parts, splits, *kept_even, num_warps=8)
    return out


def choose_tiles(rows: int, dtype: torch.dtype, *, narrow: bool, fixed: bool) -> Tiles:
    """For so many rows of a sequence, heads times queries; fixed: one size for all. narrow: the threads of a small tile
    have no room for more registers. Chosen from ptxas's reports for sm_90: none is spilled."""
    if dtype == torch.float32:  # in full precision, so without tensor cores
        return Tiles(16, 16, 4, 1)
    if fixed or rows < _MANY:
        return Tiles(16, 32, 8 if narrow else 4, 2)
    return Tiles(_MANY, 16, 8, 2)
