"""The reference backend: every kernel in plain PyTorch, on any device. The judge of the others, and what serves where
nothing was compiled. Signatures and shapes are documented in kernels/backend.py.

Results do not depend on the batch: rows never share a reduction, keys are reduced in tiles aligned to position 0, and
each product of a tile has one fixed shape, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels import lora
from quire.kernels.activation import Activation, Clamp, activate, gelu_tanh, sigmoid, silu
from quire.kernels.backend import (
    AdaptedLinear,
    AdapterSlots,
    AttentionMetadata,
    Backend,
    InGraphs,
    Linear,
    LinearContext,
    Table,
)
from quire.kernels.collective import Collective
from quire.kernels.experts import ReferenceMixture
from quire.kernels.fit import fit_int4
from quire.kernels.kv_codes import KV_CODES, UNSCALED, KVScales, load_codes, scale_elements, store_codes
from quire.kernels.latents.blocks import ReferenceBlocks
from quire.kernels.latents.latent import Latent, latent_key, rotated_queries
from quire.kernels.quantized import Given, QuantizedWeight, read_by
from quire.kernels.recurrent.recurrence import Matrices, Recurrence, Sequences, recur
from quire.kernels.recurrent.short_conv import Columns, ShortConv, short_conv
from quire.kernels.rotation import Rope, normed_and_rotated, rms_norm
from quire.kernels.routing import Experts, Mixture
from quire.kernels.softmax import Softmax

KEY_TILE = 128
QUERY_TILE = 16
_FIRST_CANDIDATES = 1024
"""Top-p looks at this many most likely tokens first; a flatter distribution is sorted whole."""


class Reference(Backend):
    name = "reference"
    block_size = 16
    keeps_bits = False
    in_graphs: InGraphs = "nothing"

    def __init__(self, *, deterministic: bool = False) -> None:
        """deterministic: on a GPU, no row's bits depend on the batch; it costs speed and needs Triton. What holds on
        the CPU, `keeps_rows_apart` says."""
        self.deterministic = deterministic

    def description(self) -> str:
        return "plain PyTorch, slower"

    def cannot_serve(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False
    ) -> str | None:
        return None

    def keeps_rows_apart(self, device: torch.device, dtype: torch.dtype) -> bool:
        return self.deterministic if device.type == "cuda" else _onednn_packs(device, dtype)

    def kv_cache_shape(self, num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
        """[pages, tokens, K, D]; of codes as kernels/kv_codes.py says."""
        return (num_blocks, self.block_size, kv_heads, head_dim + scale_elements(dtype))

    def store_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, scales: KVScales = UNSCALED
    ) -> None:
        _store(k, k_cache, slots, scales.key)
        _store(v, v_cache, slots, scales.value)

    def apply(self, linear: Linear, x: Given, context: LinearContext) -> Tensor:
        return linear(read_by(linear, x), context)

    def mix(self, mixture: Mixture, x: Tensor, routed: Tensor) -> Tensor:
        return mixture(x, routed)

    def sum(self, x: Tensor, group: Collective | None) -> Tensor:
        return x if group is None else group.sum(x)

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: Softmax
    ) -> Tensor:
        out = q.new_empty((*q.shape[:2], softmax.values or q.shape[2]))
        starts = metadata.query_start.tolist()
        for s, context in enumerate(metadata.context_lens.tolist()):
            pages = metadata.block_table[s, : -(-context // k_cache.shape[1])].long()
            k = _read(k_cache, pages, softmax.kv_scales.key, q.dtype)[:context]
            value_scale = softmax.kv_scales.value if softmax.values is None else softmax.kv_scales.key
            v = _read(v_cache, pages, value_scale, q.dtype)[:context, :, : softmax.values]
            if softmax.window is not None:  # pages before it may hold anything, NaN too, whose part no weight of 0 is 0
                unseen = max(softmax.first_seen(context - (starts[s + 1] - starts[s])), 0)
                k[:unseen], v[:unseen] = 0, 0
            for i in range(starts[s], starts[s + 1], QUERY_TILE):
                rows = slice(i, min(i + QUERY_TILE, starts[s + 1]))
                out[rows] = _attend(q[rows], k, v, metadata.positions[rows], softmax)
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        wide = x.float() if x.dtype != torch.float64 else x
        return F.layer_norm(wide, wide.shape[-1:], weight.to(wide.dtype), bias.to(wide.dtype), eps).to(x.dtype)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.layer_norm(total, weight, bias, eps), total

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return x + residual

    def add_gated(self, x: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
        return x * sigmoid(gate) + residual

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        return activate(x, activation)

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

    def mul_columns(self, x: Tensor, beside: Tensor, first: int) -> Tensor:
        return x * beside[:, first : first + x.shape[1]]

    def clamped_mul(self, gate_up: Tensor, clamp: Clamp) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=clamp.limit)
        return gate * sigmoid(clamp.alpha * gate) * (up.clamp(-clamp.limit, clamp.limit) + 1)

    def rope_store(
        self, qkv: Tensor, rope: Rope, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        kv_heads = k_cache.shape[2]
        sizes = (rope.heads(qkv.shape[1], kv_heads), *[kv_heads] * rope.projected)
        q, *kv = qkv.view(len(qkv), -1, rope.head_dim).split(sizes, dim=1)
        q = normed_and_rotated(q, rope.q_norm, rope, metadata.turned)
        if rope.q_scale is not None:
            q = (q * rope.q_scale[metadata.turned][:, None, None]).to(q.dtype)
        if kv:
            v = kv[-1] if rope.v_norm is None else rms_norm(kv[-1], rope.v_norm, rope.eps)
            k = normed_and_rotated(kv[0], rope.k_norm, rope, metadata.turned)
            self.store_kv(k, v, k_cache, v_cache, metadata.slots, rope.kv_scales)
        return q.contiguous()

    def latent_store(self, q: Tensor, kv: Tensor, latent: Latent, cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        key = latent_key(kv, latent, metadata.positions)
        _store(key, cache, metadata.slots, latent.kv_scales.key)
        heads = q.view(len(q), -1, key.shape[2]) if q.ndim == 2 else q
        return rotated_queries(heads, latent, metadata.positions)

    def short_conv(self, bcx: Tensor, conv: ShortConv, columns: Columns, metadata: AttentionMetadata) -> Tensor:
        assert metadata.state_slots is not None
        where = (metadata.query_start, metadata.context_lens, metadata.state_slots)
        return short_conv(bcx, conv, columns, where, metadata.block_table)

    def recur(
        self, given: Tensor, z: Tensor, beside: Tensor, rule: Recurrence, states: Matrices, metadata: AttentionMetadata
    ) -> Tensor:
        assert metadata.state_slots is not None
        own = Sequences(metadata.query_start, metadata.context_lens, metadata.guesses)
        return recur(given, z, beside, rule, states, metadata.sequences or own, metadata.state_slots)

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat((x, y), dim=1)

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    def sigmoid_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x.unflatten(1, (gate.shape[1], -1)) * sigmoid(gate)[:, :, None]).flatten(1)

    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
        if self.deterministic:
            from quire.kernels.gpu.triton_linear import pack_linear

            return pack_linear(weight, bias, wide=wide)
        return _pack_linear(weight, bias, wide=wide)

    def pack_blocks(self, weights: Sequence[Tensor], passed: int) -> Linear:
        return ReferenceBlocks([self.pack_linear(each, None) for each in weights], passed)

    def pack_quantized(
        self, weights: Sequence[QuantizedWeight], bias: Tensor | None, *, dtype: torch.dtype, wide: bool = False
    ) -> Linear:
        whole = torch.cat([each.dequantized() for each in weights])
        return self.pack_linear(whole.to(dtype), bias, wide=wide)

    def pack_table(self, weight: QuantizedWeight, *, dtype: torch.dtype, tied: bool) -> Table:
        whole = weight.dequantized().to(dtype)
        return Table(lambda ids: F.embedding(ids, whole), self.pack_linear(whole, None, wide=True) if tied else None)

    def mixture(self, experts: Experts) -> Mixture:
        return ReferenceMixture(self, experts)

    def adapted(self, linear: Linear, slots: AdapterSlots) -> AdaptedLinear:
        if slots.device.type == "cpu":
            return lora.ReferenceAdaptedLinear(linear)
        try:
            from quire.kernels.gpu.triton_lora import TritonAdaptedLinear
        except ModuleNotFoundError:  # there is no Triton for this platform
            raise ValueError("on a GPU adapters need Triton (pip install triton)") from None
        return TritonAdaptedLinear(linear, slots)

    def fit_int4(self, groups: Tensor, *, zero_points: bool) -> tuple[Tensor, Tensor, Tensor]:
        return fit_int4(groups, zero_points=zero_points)

    def collective(self, descriptor: int, rank: int, count: int, parent: int = 0) -> Collective:
        raise NotImplementedError

    def argmax(self, logits: Tensor) -> Tensor:
        return argmax(logits)

    def draw(self, logits: Tensor, filters: Tensor, u: Tensor) -> Tensor:
        return draw(logits, filters, u)


def _store(x: Tensor, cache: Tensor, slots: Tensor, scale: float) -> None:
    """Keys or values [T, K, D]."""
    if cache.dtype in KV_CODES:
        store_codes(x, cache, slots, scale)
    else:
        cache.view(-1, *x.shape[1:])[slots] = x


def _read(cache: Tensor, pages: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Keys or values [pages * tokens, K, D]; of codes in the type that attention for this dtype computes with."""
    if cache.dtype not in KV_CODES:
        return cache[pages].flatten(0, 1)
    some = cache.view(torch.uint8)[pages].view(cache.dtype)
    return load_codes(some, scale, torch.float64 if dtype == torch.float64 else torch.float32)


def _attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, softmax: Softmax) -> Tensor:
    """Online softmax (Milakov and Gimelshein, 2018) of up to QUERY_TILE rows over key tiles aligned to position 0."""
    rows, heads, dim = q.shape
    kv_heads, compute = k.shape[1], torch.float64 if q.dtype == torch.float64 else torch.float32
    padded = F.pad(q.to(compute), (0, 0, 0, 0, 0, QUERY_TILE - rows))
    grouped = padded.view(QUERY_TILE, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    where = F.pad(positions, (0, QUERY_TILE - rows)).repeat(heads // kv_heads)[:, None]
    peak = torch.full((*grouped.shape[:2], 1), -torch.inf, dtype=compute, device=q.device)
    total, acc = torch.zeros_like(peak), grouped.new_zeros((*grouped.shape[:2], v.shape[2]))
    ahead = len(k) if softmax.ahead is None else softmax.ahead
    for begin in range(0, min(int(positions.max()) + 1 + ahead, len(k)), KEY_TILE):
        tile = slice(begin, begin + KEY_TILE)
        short = KEY_TILE - k[tile].shape[0]
        keys = F.pad(k[tile].to(compute), (0, 0, 0, 0, 0, short)).permute(1, 2, 0)
        values = F.pad(v[tile].to(compute), (0, 0, 0, 0, 0, short)).permute(1, 0, 2)
        scores = torch.bmm(grouped, keys) * softmax.scale
        if softmax.softcap is not None:
            scores = softmax.softcap * torch.tanh(scores / softmax.softcap)
        at = torch.arange(begin, begin + KEY_TILE, device=q.device)
        if softmax.bias is not None:
            scores = scores + _bias(softmax.bias, at - where, kv_heads, rows=QUERY_TILE).to(scores)
        hidden = (at > where + ahead) | (at >= len(k))
        if softmax.window is not None:
            hidden |= at < softmax.first_seen(where)
        scores = scores.masked_fill(hidden, -torch.inf)
        above = torch.maximum(peak, scores.amax(-1, keepdim=True))
        anchor = above.masked_fill(above == -torch.inf, 0)
        weights, keep = torch.exp(scores - anchor), torch.exp(peak - anchor)
        total = total * keep + weights.sum(-1, keepdim=True)
        acc = acc * keep + torch.bmm(weights, values)
        peak = above
    if softmax.sinks is not None:
        total = total + torch.exp(_sinks(softmax.sinks, kv_heads).to(peak) - peak)
    out = (acc / total).view(kv_heads, -1, QUERY_TILE, v.shape[2])[:, :, :rows]
    return out.permute(2, 0, 1, 3).reshape(rows, heads, -1).to(q.dtype)


def _bias(table: Tensor, distances: Tensor, kv_heads: int, *, rows: int) -> Tensor:
    """Softmax.bias for distances [group * rows, keys], of which each group of rows is of one query head: [kv_heads,
    group * rows, keys]."""
    longest = (table.shape[1] - 15) // 2
    columns = (distances + longest - 1).clamp(0, table.shape[1] - 1)
    group = len(distances) // rows
    heads = torch.arange(group, device=table.device).repeat_interleave(rows)[:, None]
    return torch.stack([table[first + heads, columns] for first in range(0, kv_heads * group, group)])


def _sinks(sinks: Tensor, kv_heads: int) -> Tensor:
    """Softmax.sinks for the rows of `_attend`: [kv_heads, group * QUERY_TILE, 1]."""
    return sinks.view(kv_heads, -1).repeat_interleave(QUERY_TILE, 1).unsqueeze(2)


def argmax(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def draw(logits: Tensor, filters: Tensor, u: Tensor) -> Tensor:
    return inverse_cdf(filtered_probs(logits, filters), u)


def filtered_probs(logits: Tensor, filters: Tensor) -> Tensor:
    """Probabilities [R, vocab] after `draw`'s filters; what is left out is 0, sums are below 1."""
    temperature, top_k, top_p, min_p = filters[:, :, None].unbind(1)
    probs = torch.softmax(logits / temperature.float(), dim=-1)
    if (top_k < logits.shape[1]).any() or (top_p < 1).any():
        probs = probs.masked_fill(probs < _threshold(probs, top_k.long(), top_p), 0.0)
    return probs.masked_fill(probs < min_p.float() * probs.amax(-1, keepdim=True), 0.0)


def _threshold(probs: Tensor, k: Tensor, nucleus: Tensor) -> Tensor:
    """The least probability [R, 1] that top-k, then top-p of what top-k left, keep."""
    vocab = probs.shape[-1]
    limited = int(torch.where(k < vocab, k, 0).max())
    width = min(vocab, max(limited, _FIRST_CANDIDATES))
    while True:
        values = torch.topk(probs, width).values
        mass = values.cumsum(-1, dtype=torch.float64)
        whole = mass.gather(-1, (k - 1).clamp(max=width - 1))
        # Without top-k the whole is all the vocabulary's mass, 1, whether or not these candidates hold it.
        target = nucleus * torch.where(k < vocab, whole, torch.ones_like(whole))
        if width == vocab or bool(((mass[:, -1:] >= target) | (nucleus >= 1.0)).all()):
            break
        width = vocab
    rank = (mass < target).sum(-1, keepdim=True).clamp(max=width - 1)
    rank = torch.where(nucleus < 1.0, torch.minimum(rank, k - 1), (k - 1).clamp(max=width - 1))
    unfiltered = (k == vocab) & (nucleus >= 1.0)
    return torch.where(unfiltered, torch.zeros_like(probs[:, :1]), values.gather(-1, rank))


def inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds u [R] times the whole: [R] int64."""
    mass = probs.cumsum(-1, dtype=torch.float64)
    picks = torch.searchsorted(mass, u[:, None] * mass[:, -1:], right=True).squeeze(-1)
    # u * whole can round up to the whole itself: then it is the last token that has any probability.
    last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).to(torch.int8).argmax(-1)
    return torch.minimum(picks, last)


def _pack_linear(weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
    if not _onednn_packs(weight.device, weight.dtype):
        return _Whole(weight, bias, wide)
    linear = _pack_onednn(weight, bias)
    return (lambda x, context: linear(x, context).float()) if wide else linear


@dataclass(frozen=True, slots=True)
class _Whole:
    """A linear as PyTorch multiplies it."""

    weight: Tensor
    bias: Tensor | None
    wide: bool

    @property
    def movable(self) -> tuple[Tensor, ...]:
        """As kernels/streaming/from_host.py has it."""
        return (self.weight,)

    def __call__(self, x: Tensor, context: LinearContext) -> Tensor:
        weight = self.weight
        if self.wide and self.bias is None and weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16):
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        out = F.linear(x, weight, self.bias)
        return out.float() if self.wide else out


def _onednn_packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN packs linears of this type. What it does not pack F.linear multiplies, which picks an algorithm by
    the number of rows, so that a row's bits may depend on it."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # PyTorch for Apple's CPUs lacks it
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _pack_onednn(weight: Tensor, bias: Tensor | None) -> Linear:
    """oneDNN with the weight in its own blocked layout: up to twice as fast as F.linear at 1 to 16 rows.

    It gives a row the same bits for any number of rows from 2 up (measured for float32 and bfloat16; F.linear does not
    in float32), but takes another path for one, so a single row is doubled.
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    multiply = torch.ops.mkldnn._linear_pointwise

    def linear(x: Tensor, context: LinearContext) -> Tensor:
        if len(x) == 1:
            return multiply(x.expand(2, -1).contiguous(), packed, bias, "none", [], "")[:1]
        return multiply(x, packed, bias, "none", [], "")

    return linear
