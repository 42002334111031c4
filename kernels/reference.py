"""The reference backend: every kernel in plain PyTorch, on any device. The judge of the others, and what serves where
nothing was compiled. Signatures and shapes are documented in kernels/backend.py.

Results do not depend on the batch: rows never share a reduction, keys are reduced in tiles aligned to position 0, and
each product of a tile has one fixed shape, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.backend import (
    AttentionMetadata,
    Backend,
    DecoderLayer,
    FusedLayers,
    Linear,
    LinearContext,
    Rope,
    Softmax,
)

KEY_TILE = 128
QUERY_TILE = 16
_FIRST_CANDIDATES = 1024
"""Top-p looks at this many most likely tokens first; a flatter distribution is sorted whole."""


class Reference(Backend):
    name = "reference"
    block_size = 16

    def __init__(self, *, deterministic: bool = False) -> None:
        """deterministic: on a GPU, no row's bits depend on the batch; it costs speed and needs Triton. On the CPU they
        never do."""
        self.deterministic = deterministic

    def description(self) -> str:
        return "plain PyTorch, slower"

    def cannot_serve(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False
    ) -> str | None:
        return None

    def kv_cache_shape(self, num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
        return (num_blocks, self.block_size, kv_heads, head_dim)

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        k_cache.view(-1, *k.shape[1:])[slots] = k
        v_cache.view(-1, *v.shape[1:])[slots] = v

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: Softmax
    ) -> Tensor:
        out = torch.empty_like(q)
        starts = metadata.query_start.tolist()
        for s, context in enumerate(metadata.context_lens.tolist()):
            pages = metadata.block_table[s, : -(-context // k_cache.shape[1])].long()
            k = k_cache[pages].flatten(0, 1)[:context]
            v = v_cache[pages].flatten(0, 1)[:context]
            for i in range(starts[s], starts[s + 1], QUERY_TILE):
                rows = slice(i, min(i + QUERY_TILE, starts[s + 1]))
                out[rows] = _attend(q[rows], k, v, metadata.positions[rows], softmax)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return rms_norm(total, weight, eps), total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def rope_store(
        self, qkv: Tensor, rope: Rope, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        kv_heads = k_cache.shape[2]
        heads = qkv.shape[1] // rope.head_dim - 2 * kv_heads
        q, k, v = qkv.view(len(qkv), -1, rope.head_dim).split((heads, kv_heads, kv_heads), dim=1)
        if rope.q_norm is not None:
            q = rms_norm(q, rope.q_norm, rope.eps)
        if rope.k_norm is not None:
            k = rms_norm(k, rope.k_norm, rope.eps)
        if rope.cos_sin is not None:
            cos, sin = rope.cos_sin[metadata.positions][:, None].chunk(2, dim=-1)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        self.store_kv(k, v, k_cache, v_cache, metadata.slots)
        return q.contiguous()

    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
        if self.deterministic:
            from quire.kernels.gpu.triton_linear import pack_linear

            return pack_linear(weight, bias, wide=wide)
        return _pack_linear(weight, bias, wide=wide)

    def fuse_layers(self, layers: Sequence[DecoderLayer], *, head_dim: int, eps: float) -> FusedLayers | None:
        return None

    def argmax(self, logits: Tensor) -> Tensor:
        return argmax(logits)

    def draw(self, logits: Tensor, filters: Tensor, u: Tensor) -> Tensor:
        return draw(logits, filters, u)


def _attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, softmax: Softmax) -> Tensor:
    """Online softmax (Milakov and Gimelshein, 2018) of up to QUERY_TILE rows over key tiles aligned to position 0."""
    rows, heads, dim = q.shape
    kv_heads, compute = k.shape[1], torch.float64 if q.dtype == torch.float64 else torch.float32
    padded = F.pad(q.to(compute), (0, 0, 0, 0, 0, QUERY_TILE - rows))
    grouped = padded.view(QUERY_TILE, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    where = F.pad(positions, (0, QUERY_TILE - rows)).repeat(heads // kv_heads)[:, None]
    peak = torch.full((*grouped.shape[:2], 1), -torch.inf, dtype=compute, device=q.device)
    total, acc = torch.zeros_like(peak), torch.zeros_like(grouped)
    for begin in range(0, int(positions.max()) + 1, KEY_TILE):
        tile = slice(begin, begin + KEY_TILE)
        short = KEY_TILE - k[tile].shape[0]
        keys = F.pad(k[tile].to(compute), (0, 0, 0, 0, 0, short)).permute(1, 2, 0)
        values = F.pad(v[tile].to(compute), (0, 0, 0, 0, 0, short)).permute(1, 0, 2)
        scores = torch.bmm(grouped, keys) * softmax.scale
        if softmax.softcap is not None:
            scores = softmax.softcap * torch.tanh(scores / softmax.softcap)
        at = torch.arange(begin, begin + KEY_TILE, device=q.device)
        hidden = at > where
        if softmax.window is not None:
            hidden |= at <= where - softmax.window
        scores = scores.masked_fill(hidden, -torch.inf)
        above = torch.maximum(peak, scores.amax(-1, keepdim=True))
        anchor = above.masked_fill(above == -torch.inf, 0)
        weights, keep = torch.exp(scores - anchor), torch.exp(peak - anchor)
        total = total * keep + weights.sum(-1, keepdim=True)
        acc = acc * keep + torch.bmm(weights, values)
        peak = above
    out = (acc / total).view(kv_heads, -1, QUERY_TILE, dim)[:, :, :rows]
    return out.permute(2, 0, 1, 3).reshape(rows, heads, dim).to(q.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float() if x.dtype != torch.float64 else x
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021), halves paired; x [T, heads, D], cos, sin [T, 1, D / 2] float32."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


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
    packs = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()  # PyTorch for Apple's CPUs lacks it
    packs = packs and (
        weight.dtype == torch.float32
        or (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
    linear = _pack_onednn(weight, bias) if packs else None
    if wide and bias is None and weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16):
        return lambda x, context: torch.mm(x, weight.t(), out_dtype=torch.float32)
    if linear is None:
        linear = lambda x, context: F.linear(x, weight, bias)  # noqa: E731
    return (lambda x, context: linear(x, context).float()) if wide else linear


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
