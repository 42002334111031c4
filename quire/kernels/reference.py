"""Every kernel in plain PyTorch, for any device. It defines the results of other backends, and is the fallback if
nothing is compiled. Rows never share a reduction, so results do not depend on the batch, except in linears where
`_can_pack_onednn` is False.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.activation import apply_activation, gelu_tanh, sigmoid, silu
from quire.kernels.attention.context_shard import ContextShard, single_shard
from quire.kernels.attention.reference_attention import compute_partial_softmax, merge_shard_attention
from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import (
    AdapterSlotSpec,
    AttentionMetadata,
    Backend,
    CachePair,
    CudaGraphSupport,
    Linear,
    LinearContext,
    LinearWithLora,
    QuantizedEmbedding,
)
from quire.kernels.collective import Collective
from quire.kernels.experts import ReferenceMoE
from quire.kernels.int4_fit import fit_int4
from quire.kernels.kv_quantization import (
    QUANTIZED_KV_DTYPES,
    UNIT_KV_SCALES,
    KVScales,
    num_scale_elements,
    store_quantized_kv,
)
from quire.kernels.latent_params import (
    KeySelectionParams,
    LatentNormRopeParams,
    compute_index_key,
    compute_latent_key,
    rotate_index_heads,
    rotate_queries,
)
from quire.kernels.lora import ReferenceLinearWithLora
from quire.kernels.mla.key_selection import select_top_keys
from quire.kernels.mla.per_head_linear import ReferencePerHeadLinear
from quire.kernels.parameters.activation import Activation, ClampedSwiGLU
from quire.kernels.qk_norm_rope import QKNormRopeParams, norm_and_rotate, rms_norm
from quire.kernels.quantized_tensors import Activations, QuantizedWeight, select_linear_input
from quire.kernels.recurrent.recurrence import Recurrence, RecurrenceMetadata, RecurrentStates, run_recurrence
from quire.kernels.recurrent.short_conv import ConvStates, ShortConv, short_conv
from quire.kernels.routing import MoE, MoEComponents

_INITIAL_CANDIDATES = 1024
"""Number of most likely tokens that are sorted for top-p at first."""


class ReferenceBackend(Backend):
    name = "reference"
    block_size = 16
    keeps_weights_quantized = False
    cuda_graph_support: CudaGraphSupport = "nothing"
    context_parallel_ranks = 1

    def __init__(self, *, deterministic: bool = False) -> None:
        """If `deterministic`, the backend is batch-invariant on a GPU. This needs Triton, so only the backends of
        kernels/gpu implement it.
        """
        self.deterministic = deterministic

    def description(self) -> str:
        return "plain PyTorch, slower"

    def unsupported_reason(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False
    ) -> str | None:
        return None

    def is_batch_invariant(self, device: torch.device, dtype: torch.dtype) -> bool:
        return _can_pack_onednn(device, dtype)

    def kv_cache_shape(self, num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
        """Return [blocks, this rank's tokens of a block, K, D], where D includes the scales if quantized."""
        return (
            num_blocks,
            self.block_size // self.context_parallel_ranks,
            kv_heads,
            head_dim + num_scale_elements(dtype),
        )

    def store_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, scales: KVScales = UNIT_KV_SCALES
    ) -> None:
        _store_cache(k, k_cache, slots, scales.key)
        _store_cache(v, v_cache, slots, scales.value)

    def apply_linear(self, linear: Linear, x: Activations, context: LinearContext) -> Tensor:
        return linear(select_linear_input(linear, x), context)

    def run_moe(self, moe: MoE, x: Tensor, router_input: Tensor) -> Tensor:
        return moe(x, router_input)

    def all_reduce(self, x: Tensor, group: Collective | None) -> Tensor:
        return x if group is None else group.all_reduce(x)

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        partial_softmax = compute_partial_softmax(
            q, (k_cache, v_cache), metadata, softmax, single_shard(k_cache.shape[1])
        )
        return partial_softmax.normalize(softmax.sinks).to(q.dtype)

    def make_context_parallel_backend(self, ranks: int) -> Backend | None:
        backend = type(self)(deterministic=self.deterministic)
        backend.context_parallel_ranks, backend.block_size = ranks, self.block_size * ranks
        return backend

    def context_parallel_attention(
        self, q: Tensor, caches: CachePair, metadata: AttentionMetadata, softmax: AttentionParams, group: Collective
    ) -> Tensor:
        shard = ContextShard(group.rank, group.world_size, caches[0].shape[1])
        all_queries = group.all_gather(q).transpose(0, 1).flatten(1, 2)
        packed = self.attend_context_shard(all_queries, caches, metadata, replace(softmax, sinks=None), shard)
        parts = group.all_to_all(packed.unflatten(1, (group.world_size, -1)).transpose(0, 1))
        return self.merge_shard_attention(parts, softmax.sinks, q.dtype)

    def attend_context_shard(
        self, q: Tensor, caches: CachePair, metadata: AttentionMetadata, softmax: AttentionParams, shard: ContextShard
    ) -> Tensor:
        """Attend from q [T, H, D] to this rank's tokens. Returns `PartialSoftmax.to_packed_tensor`."""
        return compute_partial_softmax(q, caches, metadata, softmax, shard).to_packed_tensor()

    def merge_shard_attention(self, parts: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
        return merge_shard_attention(parts, sinks).to(dtype)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        wide = x.float() if x.dtype != torch.float64 else x
        return F.layer_norm(wide, wide.shape[-1:], weight.to(wide.dtype), bias.to(wide.dtype), eps).to(x.dtype)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.layer_norm(total, weight, bias, eps), total

    def add_residual(self, x: Tensor, residual: Tensor) -> Tensor:
        return x + residual

    def add_gated(self, x: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
        return x * sigmoid(gate) + residual

    def apply_activation(self, x: Tensor, activation: Activation) -> Tensor:
        return apply_activation(x, activation)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return rms_norm(total, weight, eps), total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return gelu_tanh(gate) * up

    def mul_by_column_slice(self, x: Tensor, per_layer_inputs: Tensor, first: int) -> Tensor:
        return x * per_layer_inputs[:, first : first + x.shape[1]]

    def clamp_silu_mul(self, gate_up: Tensor, clamp: ClampedSwiGLU) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=clamp.limit)
        return gate * sigmoid(clamp.alpha * gate) * (up.clamp(-clamp.limit, clamp.limit) + 1)

    def rope_and_store_kv(
        self, qkv: Tensor, rope: QKNormRopeParams, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        kv_heads = k_cache.shape[2]
        sizes = (rope.num_query_heads_of_width(qkv.shape[1], kv_heads), *[kv_heads] * rope.num_kv_projections)
        q, *kv = qkv.view(len(qkv), -1, rope.head_dim).split(sizes, dim=1)
        q = norm_and_rotate(q, rope.q_norm, rope, metadata.rope_positions)
        if rope.q_scale is not None:
            q = (q * rope.q_scale[metadata.rope_positions][:, None, None]).to(q.dtype)
        if kv:
            v = kv[-1] if rope.v_norm is None else rms_norm(kv[-1], rope.v_norm, rope.eps)
            k = norm_and_rotate(kv[0], rope.k_norm, rope, metadata.rope_positions)
            self.store_kv(k, v, k_cache, v_cache, metadata.slot_mapping, rope.kv_scales)
        return q.contiguous()

    def rope_and_store_latent_kv(
        self, q: Tensor, kv: Tensor, latent: LatentNormRopeParams, cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        key = compute_latent_key(kv, latent, metadata.positions)
        _store_cache(key, cache, metadata.slot_mapping, latent.kv_scales.key)
        heads = q.view(len(q), -1, key.shape[2]) if q.ndim == 2 else q
        return rotate_queries(heads, latent, metadata.positions)

    def select_keys(
        self,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        params: KeySelectionParams,
        cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        _store_cache(compute_index_key(k, params, metadata.positions), cache, metadata.slot_mapping, 1.0)
        heads = rotate_index_heads(q.view(len(q), -1, k.shape[1]), params, metadata.positions)
        starts, selected = metadata.query_start.tolist(), []
        for s, context in enumerate(metadata.context_lens.tolist()):
            rows = slice(starts[s], starts[s + 1])
            keys = cache[metadata.block_table[s, : -(-context // cache.shape[1])].long()].view(-1, k.shape[1])
            selected.append(
                select_top_keys(heads[rows], keys[:context], weights[rows], metadata.positions[rows], params.top_k)
            )
        return torch.cat(selected)

    def sparse_attention(
        self, q: Tensor, cache: Tensor, selected: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        shard = single_shard(cache.shape[1])
        partial_softmax = compute_partial_softmax(q, (cache, cache), metadata, softmax, shard, selected)
        return partial_softmax.normalize(None).to(q.dtype)

    def short_conv(self, bcx: Tensor, conv: ShortConv, columns: ConvStates, metadata: AttentionMetadata) -> Tensor:
        assert metadata.state_slots is not None
        where = (metadata.query_start, metadata.context_lens, metadata.state_slots)
        return short_conv(bcx, conv, columns, where, metadata.block_table)

    def run_recurrence(
        self,
        inputs: Tensor,
        z: Tensor,
        head_inputs: Tensor,
        rule: Recurrence,
        states: RecurrentStates,
        metadata: AttentionMetadata,
    ) -> Tensor:
        assert metadata.state_slots is not None
        sequences = RecurrenceMetadata(metadata.query_start, metadata.context_lens, metadata.state_and_verified_counts)
        return run_recurrence(
            inputs, z, head_inputs, rule, states, metadata.recurrence_metadata or sequences, metadata.state_slots
        )

    def concat_columns(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat((x, y), dim=1)

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x.unflatten(1, (gate.shape[1], -1)) * sigmoid(gate)[:, :, None]).flatten(1)

    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
        return _pack_linear(weight, bias, wide=wide)

    def pack_per_head_linear(self, weights: Sequence[Tensor], passthrough_dim: int) -> Linear:
        return ReferencePerHeadLinear([self.pack_linear(each, None) for each in weights], passthrough_dim)

    def pack_quantized(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None, *, dtype: torch.dtype, wide: bool = False
    ) -> Linear:
        whole = torch.cat([each.dequantize() for each in weights])
        return self.pack_linear(whole.to(dtype), bias, wide=wide)

    def pack_quantized_embedding(
        self, weight: QuantizedWeight, *, dtype: torch.dtype, tied: bool
    ) -> QuantizedEmbedding:
        whole = weight.dequantize().to(dtype)
        return QuantizedEmbedding(
            lambda ids: F.embedding(ids, whole), self.pack_linear(whole, None, wide=True) if tied else None
        )

    def make_moe(self, experts: MoEComponents) -> MoE:
        return ReferenceMoE(self, experts)

    def make_linear_with_lora(self, linear: Linear, slots: AdapterSlotSpec) -> LinearWithLora:
        return ReferenceLinearWithLora(linear)

    def fit_int4(self, groups: Tensor, *, zero_points: bool) -> tuple[Tensor, Tensor, Tensor]:
        return fit_int4(groups, zero_points=zero_points)

    def make_collective(self, descriptor: int, rank: int, count: int, parent: int = 0) -> Collective:
        raise NotImplementedError

    def argmax(self, logits: Tensor) -> Tensor:
        return argmax(logits)

    def sample_tokens(self, logits: Tensor, filters: Tensor, u: Tensor) -> Tensor:
        return sample_tokens(logits, filters, u)


def _store_cache(x: Tensor, cache: Tensor, slots: Tensor, scale: float) -> None:
    """x is keys or values [T, K, D]."""
    if cache.dtype in QUANTIZED_KV_DTYPES:
        store_quantized_kv(x, cache, slots, scale)
    else:
        cache.view(-1, *x.shape[1:])[slots] = x


def argmax(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def sample_tokens(logits: Tensor, filters: Tensor, u: Tensor) -> Tensor:
    return sample_inverse_cdf(logits_to_filtered_probs(logits, filters), u)


def logits_to_filtered_probs(logits: Tensor, filters: Tensor) -> Tensor:
    """Return probabilities [R, vocab], 0 for dropped tokens. Rows are not renormalized."""
    temperature, top_k, top_p, min_p = filters[:, :, None].unbind(1)
    probs = torch.softmax(logits / temperature.float(), dim=-1)
    if (top_k < logits.shape[1]).any() or (top_p < 1).any():
        probs = probs.masked_fill(probs < _min_kept_prob(probs, top_k.long(), top_p), 0.0)
    return probs.masked_fill(probs < min_p.float() * probs.amax(-1, keepdim=True), 0.0)


def _min_kept_prob(probs: Tensor, k: Tensor, nucleus: Tensor) -> Tensor:
    """Return [R, 1]: the least probability that top-k keeps, and that top-p keeps among the tokens left by top-k."""
    vocab = probs.shape[-1]
    limited = int(torch.where(k < vocab, k, 0).max())
    width = min(vocab, max(limited, _INITIAL_CANDIDATES))
    while True:
        values = torch.topk(probs, width).values
        mass = values.cumsum(-1, dtype=torch.float64)
        whole = mass.gather(-1, (k - 1).clamp(max=width - 1))
        # Without top-k the total mass is 1, even if these candidates hold less.
        target = nucleus * torch.where(k < vocab, whole, torch.ones_like(whole))
        if width == vocab or bool(((mass[:, -1:] >= target) | (nucleus >= 1.0)).all()):
            break
        width = vocab
    rank = (mass < target).sum(-1, keepdim=True).clamp(max=width - 1)
    rank = torch.where(nucleus < 1.0, torch.minimum(rank, k - 1), (k - 1).clamp(max=width - 1))
    unfiltered = (k == vocab) & (nucleus >= 1.0)
    return torch.where(unfiltered, torch.zeros_like(probs[:, :1]), values.gather(-1, rank))


def sample_inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """Return the first token with a cumulative probability above u [R] times the row's total: [R] int64."""
    mass = probs.cumsum(-1, dtype=torch.float64)
    picks = torch.searchsorted(mass, u[:, None] * mass[:, -1:], right=True).squeeze(-1)
    # u * total can round up to the total.
    last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).to(torch.int8).argmax(-1)
    return torch.minimum(picks, last)


def _pack_linear(weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
    if not _can_pack_onednn(weight.device, weight.dtype):
        return _TorchLinear(weight, bias, wide)
    linear = _pack_onednn(weight, bias)
    return (lambda x, context: linear(x, context).float()) if wide else linear


@dataclass(frozen=True, slots=True)
class _TorchLinear:
    weight: Tensor
    bias: Tensor | None
    has_float32_output: bool

    @property
    def offloadable_tensors(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def __call__(self, x: Tensor, context: LinearContext) -> Tensor:
        weight = self.weight
        if (
            self.has_float32_output
            and self.bias is None
            and weight.is_cuda
            and weight.dtype in (torch.bfloat16, torch.float16)
        ):
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        out = F.linear(x, weight, self.bias)
        return out.float() if self.has_float32_output else out


def _can_pack_onednn(device: torch.device, dtype: torch.dtype) -> bool:
    """If False, F.linear multiplies. Its algorithm, and therefore a row's bits, may depend on the number of rows."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _pack_onednn(weight: Tensor, bias: Tensor | None) -> Linear:
    """Pack in oneDNN's blocked layout, which is up to twice as fast as F.linear for 1 to 16 rows. A row has the same
    bits with any 2 or more rows (measured in bfloat16, and in float32, where F.linear fails this). A single row takes
    another path, so a single row is computed twice, as two rows.
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    multiply = torch.ops.mkldnn._linear_pointwise

    def linear(x: Tensor, context: LinearContext) -> Tensor:
        if len(x) == 1:
            return multiply(x.expand(2, -1).contiguous(), packed, bias, "none", [], "")[:1]
        return multiply(x, packed, bias, "none", [], "")

    return linear
