from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.attention.context_shard import ContextShard
from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.ranks.context_parallel import allocate_attention_output
from quire.kernels.gpu.triton_attention import attend, attend_splits, reduce_even_splits, reduce_fixed_splits
from quire.kernels.gpu.triton_kv_quantization import cache_format_and_views
from quire.kernels.gpu.triton_launch_sizes import (
    FIXED_SPLIT,
    MAX_PARTIAL_SUMS,
    MAX_SPLITS,
    AttentionTiles,
    allocate_split_buffers,
    cdiv,
    is_hopper,
    next_power_of_2,
    num_even_splits,
    programs_per_tile,
)

_MAX_AMD_STAGES = 2
"""More stages would take up to 96 KB of shared memory, but AMD GPUs have 64 KB."""


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    softmax: AttentionParams,
    *,
    fixed: bool,
    shard: ContextShard | None = None,
) -> Tensor:
    """Compute attention for metadata without decode_prefill_parts. Pages are [P, page size, K, D], page size a power of
    two.

    fixed: batch-invariant, with fixed splits and one tile size. Otherwise splits fill the GPU. If `shard` is given, it
    says which tokens this rank has, and the result is a `PartialSoftmax.to_packed_tensor` without sinks.
    """
    q = q.contiguous()
    window = softmax.window if fixed else softmax.window_if_limiting(metadata.max_context_len)
    tokens, heads, dim = q.shape
    out = allocate_attention_output(q, dim, shard)
    rank, ranks = (0, 1) if shard is None else (shard.rank, shard.world_size)
    page, kv_heads = k_cache.shape[1:3]
    seqs = len(metadata.context_lens)
    group = heads // kv_heads
    padded = max(16, next_power_of_2(dim))
    tiles = choose_attention_tiles(
        group, metadata.max_query_len, padded, q.dtype, fixed=fixed, hopper=is_hopper(q.device.index)
    )
    one_token = metadata.max_query_len == 1
    count = seqs if one_token else tokens // (tiles.block_m // group) + seqs
    longest = metadata.max_context_len if shard is None else shard.max_tokens_per_rank(metadata.max_context_len)
    max_programs = programs_per_tile(count * kv_heads, q.device.index)
    if fixed:
        splits = cdiv(longest, FIXED_SPLIT)
        programs = min(splits, max_programs)
    else:
        seen = longest if window is None else min(longest, window + tiles.block_n)
        splits = programs = num_even_splits(max_programs, seen, one_token)
    if tokens * heads * splits * dim > MAX_PARTIAL_SUMS:
        programs = 1
    (kv_format, keys, k_scales), (_, values, v_scales) = (
        cache_format_and_views(k_cache),
        cache_format_and_views(v_cache),
    )
    inputs = (q, keys, values, k_scales, v_scales, metadata.query_start, metadata.context_lens, metadata.block_table)
    strides = (metadata.block_table.stride(0), k_cache.stride(0), v_cache.stride(0), seqs)
    scales = softmax.kv_scales
    rules = (softmax.scale * scales.key, scales.value, softmax.softcap or 0.0, window or 0, rank)
    shapes = (heads, kv_heads, dim, padded, page, tiles.block_m, tiles.block_n, one_token)
    windowed = 0 if window is None else 1 + softmax.has_chunked_window
    kinds = (windowed, softmax.softcap is not None, FIXED_SPLIT if fixed else 0, kv_format, ranks)
    compiled = _compile_options(tiles)
    has_sinks = softmax.sinks is not None
    output_and_sinks = (out, softmax.sinks if has_sinks else q)
    if programs == 1:
        attend[count, kv_heads](*output_and_sinks, *inputs, *strides, *rules, *shapes, *kinds, has_sinks, **compiled)
        return out
    parts = allocate_split_buffers(tokens * heads, splits, dim, q.device)
    attend_splits[count, kv_heads, programs](*parts, *inputs, *strides, splits, *rules, *shapes, *kinds, **compiled)
    if fixed:
        fixed_sizes = (heads, dim, padded, page, windowed, FIXED_SPLIT, ranks, has_sinks)
        where = (metadata.positions, splits, window or 0, rank)
        reduce_fixed_splits[tokens * heads, 1](*output_and_sinks, *parts, *where, *fixed_sizes, num_warps=1)
    else:
        even_sizes = (heads, dim, padded, MAX_SPLITS, ranks, has_sinks)
        reduce_even_splits[tokens * heads, 1](*output_and_sinks, *parts, splits, *even_sizes, num_warps=4)
    return out


def _compile_options(tiles: AttentionTiles) -> dict[str, int]:
    stages = tiles.num_stages if torch.version.hip is None else min(tiles.num_stages, _MAX_AMD_STAGES)
    return {"num_warps": tiles.num_warps, "num_stages": stages}


def choose_attention_tiles(
    group: int, max_query_len: int, padded_dim: int, dtype: torch.dtype, *, fixed: bool, hopper: bool
) -> AttentionTiles:
    """Return small tiles for decodes, because these mostly wait for keys. If `fixed`, decodes and prefills have the
    same tiles.

    For sm_90 ptxas reports no spilled registers. All tiles fit in a consumer GPU's 99 KB of shared memory. Decodes have
    five pipeline stages because the block table lookup takes one. Fixed tiles of heads with over 128 elements have 64
    rows with `hopper`, because wgmma needs 64. Other GPUs would spill registers, so there such tiles have 32 rows.
    """
    rows, wide = next_power_of_2(group * max_query_len), padded_dim > 128
    if dtype == torch.float32:  # no tensor cores
        tiles = AttentionTiles(16, 16, 4, 2) if wide else AttentionTiles(16, 32, 4, 3)
    elif fixed:
        tiles = AttentionTiles(64 if hopper else 32, 32, 8, 3) if wide else AttentionTiles(64, 32, 4, 4)
    elif rows <= 16:
        tiles = AttentionTiles(16, 32, 4, 5) if wide else AttentionTiles(16, 64, 4, 5)
    elif wide:
        tiles = AttentionTiles(64, 32, 8, 3)
    else:
        tiles = AttentionTiles(64, 64, 4, 3) if rows <= 64 else AttentionTiles(128, 64, 8, 3)
    return tiles._replace(block_m=max(tiles.block_m, next_power_of_2(group)))
