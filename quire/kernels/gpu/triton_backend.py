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

from quire.kernels.attention.context_shard import ContextShard
from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata, CachePair, Linear, QuantizedEmbedding
from quire.kernels.gpu import triton_fused, triton_short_conv
from quire.kernels.gpu.experts.grouped_moe import make_grouped_moe
from quire.kernels.gpu.latents import absorbed_attention as latents
from quire.kernels.gpu.latents.triton_latent_store import store_latent_kv
from quire.kernels.gpu.latents.triton_per_head_linear import TritonPerHeadLinear
from quire.kernels.gpu.prefill_decode_split import PagedAttentionBackend, attend_by_parts
from quire.kernels.gpu.quantization import quantized_linear
from quire.kernels.gpu.ranks.context_parallel import allocate_output, merge_rank_outputs
from quire.kernels.gpu.recurrent import triton_recurrence
from quire.kernels.gpu.triton_attention import attend, attend_splits, reduce_even, reduce_fixed
from quire.kernels.gpu.triton_kv_quantization import kernel_cache_view
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
from quire.kernels.gpu.triton_linear import DenseLinear
from quire.kernels.kv_quantization import QUANTIZED_KV_DTYPES, UNIT_KV_SCALES, KVScales
from quire.kernels.latent_params import LatentParams
from quire.kernels.qk_norm_rope import Rope
from quire.kernels.quantized_tensors import QuantizedWeight
from quire.kernels.recurrent.recurrence import Recurrence, RecurrentStates
from quire.kernels.recurrent.short_conv import ConvColumns, ShortConv
from quire.kernels.routing import Experts, MoE

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_AMD_STAGES = 2
"""With more a tile of keys and values takes up to 96 KB of shared memory, of which its GPUs have 64."""


class TritonBackend(PagedAttentionBackend):
    """Pages are [page, token, KV head, head_dim]: the layout of flash-attn, whose pages are larger. Of codes as
    kernels/kv_quantization.py says."""

    name = "triton"
    block_size = 16
    keeps_weights_quantized = True
    cuda_graph_support = "steps"

    def description(self) -> str:
        return f"Triton {triton.__version__}"

    def unsupported_reason(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False
    ) -> str | None:
        if device.type != "cuda":
            return f"runs on a GPU, not on {device.type}"
        if dtype not in _DTYPES:
            return f"takes float32, bfloat16 and float16, not {dtype}"
        return None if head_dim <= 256 else f"takes a head_dim up to 256, not {head_dim}"

    def attend_part(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        return self._attend_uniform(q, (k_cache, v_cache), metadata, softmax, None)

    def compute_packed_softmax(
        self, q: Tensor, caches: CachePair, metadata: AttentionMetadata, softmax: AttentionParams, shard: ContextShard
    ) -> Tensor:
        assert softmax.lookahead == 0, "no decoder that is served has it"
        return attend_by_parts(lambda rows, part: self._attend_uniform(rows, caches, part, softmax, shard), q, metadata)

    def merge_packed_softmax(self, parts: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
        return merge_rank_outputs(parts, sinks, dtype)

    def _attend_uniform(
        self,
        q: Tensor,
        caches: CachePair,
        metadata: AttentionMetadata,
        softmax: AttentionParams,
        shard: ContextShard | None,
    ) -> Tensor:
        """Of a step that has no parts. own: see `paged_attention`."""
        if softmax.value_dim is not None:
            return latents.attend_absorbed(q, caches[0], metadata, softmax, fixed=self.deterministic, shard=shard)
        return paged_attention(q, *caches, metadata, softmax, fixed=self.deterministic, shard=shard)

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
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, scales: KVScales = UNIT_KV_SCALES
    ) -> None:
        if k_cache.dtype in QUANTIZED_KV_DTYPES:  # which no model does: rope_and_store_kv stores
            super().store_kv(k, v, k_cache, v_cache, slots, scales)
        else:
            triton_fused.store_kv(k, v, k_cache, v_cache, slots)

    def rope_and_store_kv(
        self, qkv: Tensor, rope: Rope, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        if not rope.has_fused_kernel:  # few families, in PyTorch's operations
            return super().rope_and_store_kv(qkv, rope, k_cache, v_cache, metadata)
        return triton_fused.rope_and_store_kv(qkv, rope, k_cache, v_cache, metadata)

    def store_latent_kv(
        self, q: Tensor, kv: Tensor, latent: LatentParams, cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        return store_latent_kv(q, kv, latent, cache, metadata)

    def short_conv(self, bcx: Tensor, conv: ShortConv, columns: ConvColumns, metadata: AttentionMetadata) -> Tensor:
        return triton_short_conv.short_conv(bcx, conv, columns, metadata)

    def run_recurrence(
        self,
        inputs: Tensor,
        z: Tensor,
        head_inputs: Tensor,
        rule: Recurrence,
        states: RecurrentStates,
        metadata: AttentionMetadata,
    ) -> Tensor:
        return triton_recurrence.run_recurrence(
            inputs, z, head_inputs, rule, states, metadata, fixed=self.deterministic
        )

    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
        weight = weight.contiguous()
        return DenseLinear(weight, bias, wide, super().pack_linear(weight, bias, wide=wide))

    def pack_per_head_linear(self, weights: Sequence[Tensor], passed: int) -> Linear:
        return TritonPerHeadLinear(weights, passed, fixed=self.deterministic)

    def make_moe(self, experts: Experts) -> MoE:
        return make_grouped_moe(self, experts, fixed=self.deterministic) or super().make_moe(experts)

    def pack_quantized(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None, *, dtype: torch.dtype, wide: bool = False
    ) -> Linear:
        packed = quantized_linear.pack_quantized(weights, bias, dtype=dtype, wide=wide, fixed=self.deterministic)
        return super().pack_quantized(weights, bias, dtype=dtype, wide=wide) if packed is None else packed

    def pack_embedding(self, weight: QuantizedWeight, *, dtype: torch.dtype, tied: bool) -> QuantizedEmbedding:
        packed = quantized_linear.pack_embedding(weight, dtype=dtype, tied=tied, fixed=self.deterministic)
        return super().pack_embedding(weight, dtype=dtype, tied=tied) if packed is None else packed


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
    """As in kernels/backend.py, of a step that has no parts; pages [P, page size, K, D] of any power-of-two size.

    fixed: sums are split at fixed positions and all tiles have one size, so that a row's bits do not depend on the
    batch. Otherwise sums are split to fill the GPU, which depends on how many rows there are. own: of several ranks, of
    which this one has these tokens in its pages; then it is `PartialSoftmax.to_packed_tensor` [T, H, D + 2], without
    the sinks."""
    q, window = q.contiguous(), softmax.window if fixed else softmax.effective_window(metadata.max_context_len)
    tokens, heads, dim = q.shape
    out, (rank, ranks) = allocate_output(q, dim, shard), (0, 1) if shard is None else (shard.rank, shard.world_size)
    page, kv_heads = k_cache.shape[1:3]
    seqs, group, padded = len(metadata.context_lens), heads // kv_heads, max(16, next_power_of_2(dim))
    tiles = choose_attention_tiles(
        group, metadata.max_query_len, padded, q.dtype, fixed=fixed, hopper=is_hopper(q.device.index)
    )
    one_token = metadata.max_query_len == 1
    count = seqs if one_token else tokens // (tiles.block_m // group) + seqs
    split = FIXED_SPLIT if fixed else 0
    longest = metadata.max_context_len if shard is None else shard.max_tokens_per_rank(metadata.max_context_len)
    seen = longest if window is None else min(longest, window + tiles.block_n)
    if split:
        splits = cdiv(longest, split)
        programs = min(splits, programs_per_tile(count * kv_heads, q.device.index))
    else:
        splits = programs = num_even_splits(programs_per_tile(count * kv_heads, q.device.index), seen, one_token)
    if tokens * heads * splits * dim > MAX_PARTIAL_SUMS:
        programs = 1
    (kv_format, keys, k_scales), (_, values, v_scales) = kernel_cache_view(k_cache), kernel_cache_view(v_cache)
    inputs = (q, keys, values, k_scales, v_scales, metadata.query_start, metadata.context_lens, metadata.block_table)
    strides = (metadata.block_table.stride(0), k_cache.stride(0), v_cache.stride(0), seqs)
    scales = softmax.kv_scales
    rules = (softmax.scale * scales.key, scales.value, softmax.softcap or 0.0, window or 0, rank)
    shapes = (heads, kv_heads, dim, padded, page, tiles.block_m, tiles.block_n, one_token)
    windowed = 0 if window is None else 1 + softmax.has_chunked_window
    kinds = (windowed, softmax.softcap is not None, split, kv_format, ranks)
    stages = tiles.num_stages if torch.version.hip is None else min(tiles.num_stages, _MAX_AMD_STAGES)
    compiled = {"num_warps": tiles.num_warps, "num_stages": stages}
    has_sinks = softmax.sinks is not None
    output_and_sinks = (out, softmax.sinks if has_sinks else q)
    if programs == 1:
        attend[count, kv_heads](*output_and_sinks, *inputs, *strides, *rules, *shapes, *kinds, has_sinks, **compiled)
        return out
    parts = allocate_split_buffers(tokens * heads, splits, dim, q.device)
    attend_splits[count, kv_heads, programs](*parts, *inputs, *strides, splits, *rules, *shapes, *kinds, **compiled)
    if fixed:
        reduce_sizes = (heads, dim, padded, page, windowed, split, ranks, has_sinks)
        where = (metadata.positions, splits, window or 0, rank)
        reduce_fixed[tokens * heads, 1](*output_and_sinks, *parts, *where, *reduce_sizes, num_warps=1)
    else:
        even_sizes = (heads, dim, padded, MAX_SPLITS, ranks, has_sinks)
        reduce_even[tokens * heads, 1](*output_and_sinks, *parts, splits, *even_sizes, num_warps=4)
    return out


def choose_attention_tiles(
    group: int, max_query_len: int, padded_dim: int, dtype: torch.dtype, *, fixed: bool, hopper: bool
) -> AttentionTiles:
    """Small tiles for decode steps, whose time is reading keys; large ones for prompts, whose time is arithmetic.

    fixed: one size for all. Chosen from ptxas's reports for sm_90, by what spills no register; all fit in the 99 KB of
    shared memory of a consumer GPU. A table lookup before a load takes a pipeline stage of its own, hence five. hopper:
    whose wgmma takes no fewer than 64 rows; others spill with so many of 256 numbers.
    """
    rows, wide = next_power_of_2(group * max_query_len), padded_dim > 128
    if dtype == torch.float32:  # in full precision, so without tensor cores
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
