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
    Tiles,
    cdiv,
    even_splits,
    is_hopper,
    power_of_2,
    split_parts,
    wanted_programs,
)
from quire.kernels.kv_codes import KV_CODES
from quire.kernels.softmax import Softmax

_LEAST_SPLIT, _MOST_SPLITS = 64, 128
"""Of an even split's keys. All heads read the same latents, so few tiles have to fill the GPU: one program on each
multiprocessor, whose shared memory a tile of many rows takes."""
_REDUCED = ((32, 512, 8), (_MOST_SPLITS, 64, 4))
"""Splits up to which so many numbers of a row are reduced by one program, of so many warps."""
_FIXED_NUMBERS = 128
"""The same where splits follow each other."""


def attention(
    q: Tensor, cache: Tensor, metadata: AttentionMetadata, softmax: Softmax, *, fixed: bool, own: Own | None = None
) -> Tensor:
    """`Operations.paged_attention` with Softmax.values, of a step that has no parts: q [T, H, L + R], pages [P, page
    size, 1, L + R] of any power-of-two size. fixed, own: as paged_attention of triton_paged.py has them."""
    assert softmax.values is not None
    q, (tokens, heads, dim), values, page = q.contiguous(), q.shape, softmax.values, cache.shape[1]
    rank, ranks = (0, 1) if own is None else (own.rank, own.count)
    out, seqs, device = made_for(q, values, own), len(metadata.context_lens), q.device.index
    one_token, longest = metadata.max_query_len == 1, metadata.max_context_len
    longest = longest if own is None else own.most(longest)
    rows = heads if fixed else heads * metadata.max_query_len
    tiles = choose_tiles(rows, q.dtype, coded=cache.dtype in KV_CODES, fixed=fixed, hopper=is_hopper(device))
    count = seqs * cdiv(heads, tiles.block_m) if one_token else tokens * heads // tiles.block_m + seqs
    split = FIXED_SPLIT if fixed else 0
    if split:
        splits = cdiv(longest, split)
        programs = min(splits, wanted_programs(count, device))
    else:
        wanted = wanted_programs(count, device, each=1)
        splits = programs = even_splits(wanted, longest, one_token, least=_LEAST_SPLIT, most=_MOST_SPLITS)
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
    parts, looped = split_parts(tokens * heads, splits, values, q.device), programs < splits
    attend_latent_splits[count, programs](*parts, *inputs, *strides, splits, *rules, *sizes, *kinds, looped, **compiled)
    if fixed:
        block = min(sizes[2], _FIXED_NUMBERS)
        kept = (heads, values, block, page, False, split, ranks, False)
        grid = (tokens * heads, cdiv(values, block))
        reduce_fixed[grid](out, q, *parts, metadata.positions, splits, 0, rank, *kept, num_warps=1)
    else:
        most, numbers, num_warps = next(each for each in _REDUCED if splits <= each[0])
        block = min(sizes[2], numbers)
        kept_even = (heads, values, block, most, ranks, False)
        reduce_even[tokens * heads, cdiv(values, block)](out, q, *parts, splits, *kept_even, num_warps=num_warps)
    return out


def choose_tiles(rows: int, dtype: torch.dtype, *, coded: bool, fixed: bool, hopper: bool) -> Tiles:
    """For so many rows of a sequence, heads times queries; fixed: one size for all that a model has, and rows are its
    heads. coded: pages hold codes, whose numbers take registers. Measured on an H100 for pages of 16 bits; without
    hopper, whose tiles of 64 rows are wgmma's, all fit in the 99 KB of shared memory of a consumer GPU."""
    if dtype == torch.float32:  # in full precision, so without tensor cores
        return Tiles(16, 16, 4, 1)
    if rows <= 16 or (fixed and (coded or not hopper)):
        return Tiles(16, 32, 8 if coded or fixed else 4, 3)
    if coded or not hopper:
        return Tiles(32, 16, 8, 2)
    if fixed:
        return Tiles(64, 32, 8, 3)
    return Tiles(32, 64, 8, 3) if rows <= 32 else Tiles(64, 64, 8, 2)
