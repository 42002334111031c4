"""The Triton backend: paged attention for pages of any size on any GPU that Triton compiles for.

No call waits for the device, and every grid follows from shapes and from the metadata's two maxima. So a decode step
replayed from a CUDA graph stays correct while its contexts grow. Tile sizes come from a table, not from autotuning: the
first call of a kind compiles its kernel (this takes seconds; Triton then keeps it on disk), no later call does.
Kernels: kernels/gpu/triton_attention.py, kernels/gpu/triton_fused.py, kernels/gpu/triton_short_conv.py,
kernels/gpu/quantization/triton_quantized.py, and the rooms kernels/gpu/experts, latents and recurrent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from quire.kernels.attention.own import Own
from quire.kernels.backend import AttentionMetadata, CachePair, Linear, Table
from quire.kernels.gpu import triton_fused, triton_short_conv
from quire.kernels.gpu.experts.mixture import grouped_mixture
from quire.kernels.gpu.latents import attention as latents
from quire.kernels.gpu.latents.triton_blocks import TritonBlocks
from quire.kernels.gpu.latents.triton_store import latent_store
from quire.kernels.gpu.mixed import PagedAttention, by_parts
from quire.kernels.gpu.quantization import quantized
from quire.kernels.gpu.ranks.divided import made_for, merged
from quire.kernels.gpu.recurrent import recur
from quire.kernels.gpu.triton_attention import attend, attend_splits, reduce_even, reduce_fixed
from quire.kernels.gpu.triton_codes import held_in
from quire.kernels.gpu.triton_linear import DenseLinear
from quire.kernels.gpu.triton_sizes import (
    FIXED_SPLIT,
    MOST_PARTS,
    MOST_SPLITS,
    Tiles,
    cdiv,
    even_splits,
    is_hopper,
    power_of_2,
    split_parts,
    wanted_programs,
)
from quire.kernels.kv_codes import KV_CODES, UNSCALED, KVScales
from quire.kernels.latents.latent import Latent
from quire.kernels.quantized import QuantizedWeight
from quire.kernels.recurrent.recurrence import Matrices, Recurrence
from quire.kernels.recurrent.short_conv import Columns, ShortConv
from quire.kernels.rotation import Rope
from quire.kernels.routing import Experts, Mixture
from quire.kernels.softmax import Softmax

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_STAGES_OF_AMD = 2
"""With more a tile of keys and values takes up to 96 KB of shared memory, of which its GPUs have 64."""


class Triton(PagedAttention):
    """Pages are [page, token, KV head, head_dim]: the layout of flash-attn, whose pages are larger. Of codes as
    kernels/kv_codes.py says."""

    name = "triton"
    block_size = 16
    keeps_bits = True
    in_graphs = "steps"

    def description(self) -> str:
        return f"Triton {triton.__version__}"

    def cannot_serve(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False
    ) -> str | None:
        if device.type != "cuda":
            return f"runs on a GPU, not on {device.type}"
        if dtype not in _DTYPES:
            return f"takes float32, bfloat16 and float16, not {dtype}"
        return None if head_dim <= 256 else f"takes a head_dim up to 256, not {head_dim}"

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: Softmax
    ) -> Tensor:
        return self._sums(q, (k_cache, v_cache), metadata, softmax, None)

    def packed_sums(
        self, q: Tensor, caches: CachePair, metadata: AttentionMetadata, softmax: Softmax, own: Own
    ) -> Tensor:
        assert softmax.ahead == 0, "no decoder that is served has it"
        return by_parts(lambda rows, part: self._sums(rows, caches, part, softmax, own), q, metadata)

    def merged_sums(self, parts: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
        return merged(parts, sinks, dtype)

    def _sums(
        self, q: Tensor, caches: CachePair, metadata: AttentionMetadata, softmax: Softmax, own: Own | None
    ) -> Tensor:
        """Of a step that has no parts. own: see `paged_attention`."""
        if softmax.values is not None:
            return latents.attention(q, caches[0], metadata, softmax, fixed=self.deterministic, own=own)
        return paged_attention(q, *caches, metadata, softmax, fixed=self.deterministic, own=own)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return triton_fused.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return triton_fused.add_rms_norm(x, residual, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return triton_fused.layer_norm(x, weight, bias, eps)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return triton_fused.add_layer_norm(x, residual, weight, bias, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return triton_fused.silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return triton_fused.gelu_mul(gate_up)

    def store_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, scales: KVScales = UNSCALED
    ) -> None:
        if k_cache.dtype in KV_CODES:  # which no model does: rope_store stores
            super().store_kv(k, v, k_cache, v_cache, slots, scales)
        else:
            triton_fused.store_kv(k, v, k_cache, v_cache, slots)

    def rope_store(
        self, qkv: Tensor, rope: Rope, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        if not rope.is_plain:  # few families, in PyTorch's operations
            return super().rope_store(qkv, rope, k_cache, v_cache, metadata)
        return triton_fused.rope_store(qkv, rope, k_cache, v_cache, metadata)

    def latent_store(self, q: Tensor, kv: Tensor, latent: Latent, cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        return latent_store(q, kv, latent, cache, metadata)

    def short_conv(self, bcx: Tensor, conv: ShortConv, columns: Columns, metadata: AttentionMetadata) -> Tensor:
        return triton_short_conv.short_conv(bcx, conv, columns, metadata)

    def recur(
        self, given: Tensor, z: Tensor, beside: Tensor, rule: Recurrence, states: Matrices, metadata: AttentionMetadata
    ) -> Tensor:
        return recur.recur(given, z, beside, rule, states, metadata, fixed=self.deterministic)

    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
        weight = weight.contiguous()
        return DenseLinear(weight, bias, wide, super().pack_linear(weight, bias, wide=wide))

    def pack_blocks(self, weights: Sequence[Tensor], passed: int) -> Linear:
        return TritonBlocks(weights, passed, fixed=self.deterministic)

    def mixture(self, experts: Experts) -> Mixture:
        return grouped_mixture(self, experts, fixed=self.deterministic) or super().mixture(experts)

    def pack_quantized(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None, *, dtype: torch.dtype, wide: bool = False
    ) -> Linear:
        packed = quantized.pack_quantized(weights, bias, dtype=dtype, wide=wide, fixed=self.deterministic)
        return super().pack_quantized(weights, bias, dtype=dtype, wide=wide) if packed is None else packed

    def pack_table(self, weight: QuantizedWeight, *, dtype: torch.dtype, tied: bool) -> Table:
        packed = quantized.pack_table(weight, dtype=dtype, tied=tied, fixed=self.deterministic)
        return super().pack_table(weight, dtype=dtype, tied=tied) if packed is None else packed


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    softmax: Softmax,
    *,
    fixed: bool,
    own: Own | None = None,
) -> Tensor:
    """As in kernels/backend.py, of a step that has no parts; pages [P, page size, K, D] of any power-of-two size.

    fixed: sums are split at fixed positions and all tiles have one size, so that a row's bits do not depend on the
    batch. Otherwise sums are split to fill the GPU, which depends on how many rows there are. own: of several ranks, of
    which this one has these tokens in its pages; then it is `Sums.packed` [T, H, D + 2], without the sinks.
    """
    q, window = q.contiguous(), softmax.window if fixed else softmax.window_in(metadata.max_context_len)
    tokens, heads, dim = q.shape
    out, (rank, ranks) = made_for(q, dim, own), (0, 1) if own is None else (own.rank, own.count)
    page, kv_heads = k_cache.shape[1:3]
    seqs, group, padded = len(metadata.context_lens), heads // kv_heads, max(16, power_of_2(dim))
    tiles = choose_tiles(group, metadata.max_query_len, padded, q.dtype, fixed=fixed, hopper=is_hopper(q.device.index))
    one_token = metadata.max_query_len == 1
    count = seqs if one_token else tokens // (tiles.block_m // group) + seqs
    split = FIXED_SPLIT if fixed else 0
    longest = metadata.max_context_len if own is None else own.most(metadata.max_context_len)
    seen = longest if window is None else min(longest, window + tiles.block_n)
    if split:
        splits = cdiv(longest, split)
        programs = min(splits, wanted_programs(count * kv_heads, q.device.index))
    else:
        splits = programs = even_splits(wanted_programs(count * kv_heads, q.device.index), seen, one_token)
    if tokens * heads * splits * dim > MOST_PARTS:
        programs = 1
    (held, keys, k_scales), (_, values, v_scales) = held_in(k_cache), held_in(v_cache)
    inputs = (q, keys, values, k_scales, v_scales, metadata.query_start, metadata.context_lens, metadata.block_table)
    strides = (metadata.block_table.stride(0), k_cache.stride(0), v_cache.stride(0), seqs)
    scales = softmax.kv_scales
    rules = (softmax.scale * scales.key, scales.value, softmax.softcap or 0.0, window or 0, rank)
    shapes = (heads, kv_heads, dim, padded, page, tiles.block_m, tiles.block_n, one_token)
    windowed = 0 if window is None else 1 + softmax.chunked
    kinds = (windowed, softmax.softcap is not None, split, held, ranks)
    stages = tiles.num_stages if torch.version.hip is None else min(tiles.num_stages, _MOST_STAGES_OF_AMD)
    compiled = {"num_warps": tiles.num_warps, "num_stages": stages}
    has_sinks = softmax.sinks is not None
    given = (out, softmax.sinks if has_sinks else q)
    if programs == 1:
        attend[count, kv_heads](*given, *inputs, *strides, *rules, *shapes, *kinds, has_sinks, **compiled)
        return out
    parts = split_parts(tokens * heads, splits, dim, q.device)
    attend_splits[count, kv_heads, programs](*parts, *inputs, *strides, splits, *rules, *shapes, *kinds, **compiled)
    if fixed:
        kept = (heads, dim, padded, page, windowed, split, ranks, has_sinks)
        where = (metadata.positions, splits, window or 0, rank)
        reduce_fixed[tokens * heads, 1](*given, *parts, *where, *kept, num_warps=1)
    else:
        kept_even = (heads, dim, padded, MOST_SPLITS, ranks, has_sinks)
        reduce_even[tokens * heads, 1](*given, *parts, splits, *kept_even, num_warps=4)
    return out


def choose_tiles(
    group: int, max_query_len: int, padded_dim: int, dtype: torch.dtype, *, fixed: bool, hopper: bool
) -> Tiles:
    """Small tiles for decode steps, whose time is reading keys; large ones for prompts, whose time is arithmetic.

    fixed: one size for all. Chosen from ptxas's reports for sm_90, by what spills no register; all fit in the 99 KB of
    shared memory of a consumer GPU. A table lookup before a load takes a pipeline stage of its own, hence five. hopper:
    whose wgmma takes no fewer than 64 rows; others spill with so many of 256 numbers.
    """
    rows, wide = power_of_2(group * max_query_len), padded_dim > 128
    if dtype == torch.float32:  # in full precision, so without tensor cores
        tiles = Tiles(16, 16, 4, 2) if wide else Tiles(16, 32, 4, 3)
    elif fixed:
        tiles = Tiles(64 if hopper else 32, 32, 8, 3) if wide else Tiles(64, 32, 4, 4)
    elif rows <= 16:
        tiles = Tiles(16, 32, 4, 5) if wide else Tiles(16, 64, 4, 5)
    elif wide:
        tiles = Tiles(64, 32, 8, 3)
    else:
        tiles = Tiles(64, 64, 4, 3) if rows <= 64 else Tiles(128, 64, 8, 3)
    return tiles._replace(block_m=max(tiles.block_m, power_of_2(group)))
