from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.attention.context_shard import ContextShard
from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.mla.triton_latents import attend_latent_splits, attend_latents
from quire.kernels.gpu.ranks.context_parallel import allocate_attention_output
from quire.kernels.gpu.triton_attention import reduce_even_splits, reduce_fixed_splits
from quire.kernels.gpu.triton_kv_quantization import cache_format_and_views
from quire.kernels.gpu.triton_launch_sizes import (
    FIXED_SPLIT,
    MAX_PARTIAL_SUMS,
    AttentionTiles,
    allocate_split_buffers,
    cdiv,
    is_hopper,
    next_power_of_2,
    num_even_splits,
    programs_per_tile,
)
from quire.kernels.kv_quantization import QUANTIZED_KV_DTYPES

_MIN_SPLIT, _MAX_SPLITS = 64, 128
"""Minimum of keys per split, and maximum of splits. A multiprocessor runs one program at a time, because tiles of many
rows take all its shared memory.
"""
_REDUCE_SHAPES = ((32, 512, 8), (_MAX_SPLITS, 64, 4))
"""(maximum splits, elements of a row per program, warps). The first that fits is used."""
_FIXED_REDUCE_BLOCK = 128


def attend_absorbed(
    q: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
    softmax: AttentionParams,
    *,
    fixed: bool,
    shard: ContextShard | None = None,
) -> Tensor:
    """q [T, H, L + R] is absorbed. Pages are [P, page size, 1, L + R], page size a power of two. metadata must have no
    decode_prefill_parts. fixed, shard: see triton_paged_attention.py.
    """
    assert softmax.value_dim is not None
    q = q.contiguous()
    tokens, heads, dim = q.shape
    values = softmax.value_dim
    page = cache.shape[1]
    rank, ranks = (0, 1) if shard is None else (shard.rank, shard.world_size)
    out = allocate_attention_output(q, values, shard)
    seqs = len(metadata.context_lens)
    device = q.device.index
    one_token, longest = metadata.max_query_len == 1, metadata.max_context_len
    longest = longest if shard is None else shard.max_tokens_per_rank(longest)
    rows = heads if fixed else heads * metadata.max_query_len
    tiles = choose_absorbed_tiles(
        rows, q.dtype, coded=cache.dtype in QUANTIZED_KV_DTYPES, fixed=fixed, hopper=is_hopper(device)
    )
    count = seqs * cdiv(heads, tiles.block_m) if one_token else tokens * heads // tiles.block_m + seqs
    split = FIXED_SPLIT if fixed else 0
    if split:
        splits = cdiv(longest, split)
        programs = min(splits, programs_per_tile(count, device))
    else:
        wanted = programs_per_tile(count, device, programs_per_processor=1)
        splits = programs = num_even_splits(wanted, longest, one_token, least=_MIN_SPLIT, most=_MAX_SPLITS)
    if tokens * heads * splits * values > MAX_PARTIAL_SUMS:
        programs = 1
    kv_format, codes, scales = cache_format_and_views(cache)
    inputs = (q, codes, scales, metadata.query_start, metadata.context_lens, metadata.block_table)
    strides = (metadata.block_table.stride(0), cache.stride(0), seqs)
    key_scale = softmax.kv_scales.key
    rotated = dim - values
    sizes = (heads, values, next_power_of_2(values), rotated, max(16, next_power_of_2(rotated)), page)
    kinds = (tiles.block_m, tiles.block_n, one_token, split, kv_format, ranks)
    compiled = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    rules = (softmax.scale * key_scale, key_scale, rank)
    if programs == 1:
        attend_latents[count,](out, *inputs, *strides, *rules, *sizes, *kinds, **compiled)
        return out
    parts, looped = allocate_split_buffers(tokens * heads, splits, values, q.device), programs < splits
    attend_latent_splits[count, programs](*parts, *inputs, *strides, splits, *rules, *sizes, *kinds, looped, **compiled)
    if fixed:
        block = min(sizes[2], _FIXED_REDUCE_BLOCK)
        reduce_sizes = (heads, values, block, page, False, split, ranks, False)
        grid = (tokens * heads, cdiv(values, block))
        reduce_fixed_splits[grid](out, q, *parts, metadata.positions, splits, 0, rank, *reduce_sizes, num_warps=1)
    else:
        most, numbers, num_warps = next(each for each in _REDUCE_SHAPES if splits <= each[0])
        block = min(sizes[2], numbers)
        even_sizes = (heads, values, block, most, ranks, False)
        reduce_even_splits[tokens * heads, cdiv(values, block)](
            out, q, *parts, splits, *even_sizes, num_warps=num_warps
        )
    return out


def choose_absorbed_tiles(rows: int, dtype: torch.dtype, *, coded: bool, fixed: bool, hopper: bool) -> AttentionTiles:
    """`rows` is heads times queries of a sequence, or heads if fixed. If `coded`, pages are quantized, and decoding
    takes registers. Measured on an H100 with 16-bit pages. Hopper's wgmma has tiles of 64 rows. Without `hopper`, tiles
    fit in a consumer GPU's 99 KB of shared memory.
    """
    if dtype == torch.float32:  # no tensor cores
        return AttentionTiles(16, 16, 4, 1)
    if rows <= 16 or (fixed and (coded or not hopper)):
        return AttentionTiles(16, 32, 8 if coded or fixed else 4, 3)
    if coded or not hopper:
        return AttentionTiles(32, 16, 8, 2)
    if fixed:
        return AttentionTiles(64, 32, 8, 3)
    return AttentionTiles(32, 64, 8, 3) if rows <= 32 else AttentionTiles(64, 64, 8, 2)
