"""Grouped-query attention (Ainslie et al., 2023) over paged keys and values, with the norms around it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor

from quire.engine.checkpoint.parts.states import PagedState, SharedState
from quire.engine.layers.linear import JoinedLinear, Projection
from quire.engine.layers.norm import NormSpec, NormWeights
from quire.engine.layers.parameters import ParameterTable, held, parameters_of, rows_of
from quire.engine.layers.part import (
    BuildContext,
    Normed,
    PageTensor,
    Step,
    Sublayer,
    SublayerSpec,
    attend,
    times,
    uneven,
)
from quire.engine.layers.rope import Growth, growth_of
from quire.kernels.backend import Operations
from quire.kernels.kv_codes import UNSCALED, scale_elements
from quire.kernels.quantized import Given
from quire.kernels.rotation import Rope
from quire.kernels.softmax import Softmax


@dataclass(frozen=True, slots=True)
class AttentionSpec(SublayerSpec):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Of scores."""
    rope: dict[str, Any] | None
    """How positions are rotated in, as ModelConfig.rope says it; None: not at all (NoPE)."""
    norm: NormSpec
    window: int | None = None
    """Keys a query sees, itself included; None: all."""
    chunked: bool = False
    """As Softmax.chunked."""
    softcap: float | None = None
    """Scores s become c * tanh(s / c)."""
    sinks: bool = False
    """Every query head has a score beside those of its keys, which takes a part of the weights (Softmax.sinks)."""
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["heads", "whole", "centred", "after", "unit"] | None = None
    """Norm of queries and keys, as Rope.norm says it; unit: as after, without weights; None: there is none."""
    growth: Growth | None = None
    """How queries grow with their position; None: as `rope` says it."""
    alibi: float | None = None
    """Scores fall with the distance, for each head by a slope of its own, times this (ALiBi, Press et al., 2022)."""
    input_norm: bool = True
    """Norm of what is projected."""
    gated: bool = False
    """What each query head gives is multiplied with the sigmoid of a gate, which is projected as queries are."""
    head_gates: bool = False
    """The same by one number for each head."""
    output_norm: bool = False
    """Norm of what attention gives, before it joins the residual stream."""
    axes: tuple[int, ...] | None = None
    """For each frequency of the rotation, which of AttentionMetadata.axes turns it; None: none of them."""
    factor: float = 1.0
    """What it gives is multiplied with it."""
    input_size: int | None = None
    """Of what is projected, where it is not the residual stream; None: it is that."""
    v_norm: bool = False
    """Norm of each value head, without weights."""
    keys_are_values: bool = False
    """Values are what keys are before their norm and rotation."""
    ahead: int | None = 0
    """Keys behind its own that a query sees; None: all."""
    together: bool = True
    """Tokens of an image see each other, where a step says so."""
    source: int | None = None
    """The layer whose keys and values it reads; None: it has its own."""

    @property
    def state(self) -> PagedState | SharedState:
        if self.source is not None:
            return SharedState(self.source, self.window)
        return PagedState(2 * self.num_kv_heads * self.head_dim, self.window, self.head_dim)

    def part(self, making: BuildContext, layer: str) -> PagedPart:
        return Attention(self, making, layer)

    def indivisible(self, ranks: int) -> str | None:
        if (heads := uneven(self.num_heads, f"{self.num_heads} heads", ranks)) is not None:
            return heads
        if self.num_kv_heads % ranks and ranks % self.num_kv_heads:
            return f"{ranks} ranks can neither divide the model's {self.num_kv_heads} key-value heads nor share them"
        if self.qk_norm in ("whole", "centred"):
            return "the norm of all heads' queries and keys cannot be divided among ranks"
        return None


class PagedPart(Sublayer):
    """It keeps keys and values in pages."""

    def __init__(self, spec: AttentionSpec, making: BuildContext, kv_heads: int) -> None:
        """`kv_heads`: this rank's."""
        self._spec, self._making, self._kv_heads = spec, making, kv_heads

    def pages(self, num_blocks: int) -> tuple[PageTensor, ...]:
        """A key cache and a value cache."""
        if self._spec.source is not None:
            return ()
        kind = self._making.kv_dtype
        shape = self._making.backend.kv_cache_shape(num_blocks, self._kv_heads, self._spec.head_dim, kind)
        return PageTensor(shape, kind), PageTensor(shape, kind)

    @property
    def reads(self) -> int:
        return 2

    @property
    def page_formula(self) -> str:
        dim, kind, beside = self._spec.head_dim, self._making.kv_dtype, scale_elements(self._making.kv_dtype)
        head = f"({dim} + {beside})" if beside else f"{dim}"
        tokens = self._making.shard.own(self._making.backend.block_size).tile
        return f"2 x {tokens} tokens x {self._kv_heads} heads x {head} x {kind.itemsize} B"


class Attention(PagedPart):
    def __init__(self, spec: AttentionSpec, making: BuildContext, layer: str) -> None:
        shard, dim, hidden = making.shard, spec.head_dim, making.hidden_size
        heads, kv_heads = shard.span(spec.num_heads), shard.kv_heads(spec.num_kv_heads)
        super().__init__(spec, making, len(kv_heads))
        self._kv_scales = making.kv_scales.get(layer, UNSCALED)
        self._cos_sin = None if spec.rope is None else making.rope_table(spec.rope, dim)
        self._which: Tensor | None = None
        if spec.axes is not None:
            rest = dim // 2 - len(spec.axes)  # frequencies that are not turned at all
            self._which = torch.tensor([*spec.axes, *[0] * rest] * 2, device=making.device)
        self._prefix = prefix = f"{layer}.self_attn"
        q, k, v, out = (f"{prefix}.{name}_proj" for name in "qkvo")
        q_size, kv_size = spec.num_heads * dim, spec.num_kv_heads * dim
        cuts = {q: shard.heads(heads, dim), k: shard.heads(kv_heads, dim), v: shard.heads(kv_heads, dim)}
        linear = partial(making.linears, making.scheme, adapters=making.adapters)
        self._given: Literal["all", "keys", "queries"] = "keys" if spec.keys_are_values else "all"
        sizes = {q: q_size, k: kv_size} if spec.keys_are_values else {q: q_size, k: kv_size, v: kv_size}
        if spec.source is not None:
            self._given, sizes = "queries", {q: q_size}
        self._qkv: Projection = linear(
            spec.input_size or hidden, sizes, bias=spec.qkv_bias, cuts={name: cuts[name] for name in sizes}
        )
        gate = f"{prefix}.gate_proj"
        gates = {gate: q_size if spec.gated else spec.num_heads} if spec.gated or spec.head_gates else {}
        cuts[gate] = cuts[q] if spec.gated else shard.heads(heads, 1)
        bias = spec.qkv_bias and spec.gated
        self._gate = linear(hidden, gates, bias=bias, cuts={gate: cuts[gate]}) if gates else None
        self._out = linear(q_size, {out: hidden}, bias=spec.out_bias, cuts={out: shard.ins(q_size)})
        self._input_norm, self._output_norm = f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"
        norms = {self._input_norm: hidden} if spec.input_norm else {}
        if spec.output_norm:
            norms |= {self._output_norm: hidden}
        self._norms = NormWeights(norms, making.dtype, spec.norm)
        reads = (self._qkv,) if self._gate is None else (self._qkv, self._gate)
        self._readers = tuple(each for each in reads if isinstance(each, JoinedLinear))
        each = spec.qk_norm in ("whole", "centred")
        head_norms = {f"{prefix}.q_norm": q_size if each else dim}
        head_norms |= {f"{prefix}.k_norm": kv_size if each else dim} if spec.source is None else {}
        rms = NormSpec(spec.norm.eps, spec.norm.offset)
        self._head_norms = NormWeights({} if spec.qk_norm in (None, "unit") else head_norms, making.dtype, rms)
        self._weights: dict[str, Tensor] = {}
        biased = range(spec.num_heads) if shard.divides_tokens else heads
        self._bias = None if spec.alibi is None else making.alibi(spec.alibi, spec.num_heads, biased)

    def parameters(self) -> ParameterTable:
        table = parameters_of(self._norms, self._head_norms, self._qkv, self._out, self._gate)
        if self._spec.sinks:
            sinks, cut = (self._spec.num_heads,), rows_of(self._making.shard.span(self._spec.num_heads))
            table[f"{self._prefix}.sinks"] = held(self._weights, "sinks", sinks, torch.float32, cut=cut)
        return table

    def normed(self) -> tuple[Normed, ...]:
        if not self._spec.input_norm or self._spec.input_size is not None:
            return ()
        return (Normed(self._input_norm, self._spec.norm.offset, self._readers),)

    def forward(self, run: Operations, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        normed: Given = x
        if self._spec.input_size is None:
            normed, residual = self._norms.read_by(self._readers, run, self._input_norm, x, residual)
        assert residual is not None
        metadata, context, (k_cache, v_cache) = step.metadata, step.context, step.pages
        gate = None if self._gate is None else self._gate.apply(run, normed, context)
        rope, turned = self.rope, metadata
        if metadata.axes is not None and self._spec.axes is not None:
            rope, turned = self._along(metadata.axes), replace(metadata, turns=torch.arange(len(x), device=x.device))
        qkv = run.cast(self._qkv.apply(run, normed, context), self._making.attended_in)
        q = run.rope_store(qkv, rope, k_cache, v_cache, turned)
        attended = attend(run, self._making.shard, q, (k_cache, v_cache), metadata, self._softmax)
        if (seen := metadata.together) is not None and self._spec.together:
            both_ways = replace(self._softmax, ahead=None)
            attended[seen.rows] = run.paged_attention(q[seen.rows], k_cache, v_cache, seen.metadata, both_ways)
        attended = run.cast(attended.flatten(1), self._making.dtype)
        if step.rows is not None:
            attended, residual, context = attended[step.rows], residual[step.rows], context.at(step.rows)
            gate = None if gate is None else gate[step.rows]
        if gate is not None:
            attended = run.sigmoid_mul(attended, gate)
        x = run.sum(self._out.apply(run, attended, context), self._making.shard.group)
        return self._norms.norm(run, self._output_norm, times(run, x, self._spec.factor)), residual

    @cached_property
    def rope(self) -> Rope:
        """How heads are rotated and stored, once its weights are there."""
        spec, (q_norm, k_norm) = self._spec, (self._head_norms.get(f"{self._prefix}.{name}_norm") for name in "qk")
        growth = growth_of(spec.rope) if spec.growth is None and spec.rope is not None else spec.growth
        scale, ones = None, torch.ones(spec.head_dim, device=self._making.device)
        if growth is not None:
            scale = self._making.query_scales(growth)
        if spec.qk_norm == "unit":
            q_norm = k_norm = ones
        kind = "after" if spec.qk_norm == "unit" else spec.qk_norm or "heads"
        beside = (self._kv_scales, kind, scale, ones if spec.v_norm else None, self._given)
        return Rope(spec.head_dim, self._cos_sin, q_norm, k_norm, spec.norm.eps, *beside)

    def _along(self, axes: Tensor) -> Rope:
        """With a row for each token of a step: frequencies are turned by that one of its coordinates [T, 3] which they
        are of. The numbers are the table's, so that a token has the same bits with three equal coordinates."""
        assert self._cos_sin is not None
        return replace(self.rope, cos_sin=self._cos_sin.gather(0, axes[:, self._which]))

    @cached_property
    def _softmax(self) -> Softmax:
        spec = self._spec
        assert ("sinks" in self._weights) == spec.sinks, "weights are not loaded"
        seen = (spec.scale, spec.window, spec.softcap, spec.ahead, self._bias, self._kv_scales)
        return Softmax(*seen, sinks=self._weights.get("sinks"), chunked=spec.chunked)
