"""A gated delta net (Yang et al., 2024; Qwen3-Next) in attention's place: what a sequence keeps is of one size, however
long it is. What is computed kernels/recurrent/delta_rule.py says, and kernels/recurrent/short_conv.py what stands
before it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from quire.engine.checkpoint.parts.states import MatrixState
from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.norm import NormSpec, NormWeights
from quire.engine.layers.parameters import Parameter, ParameterTable
from quire.engine.layers.part import Making, Normed, PageTensor, Part, PartSpec, Step
from quire.engine.layers.shard import Cut
from quire.kernels.backend import Operations
from quire.kernels.recurrent.delta_rule import DeltaRule
from quire.kernels.recurrent.recurrence import Matrices
from quire.kernels.recurrent.short_conv import Columns, ShortConv


@dataclass(frozen=True, slots=True)
class DeltaNetSpec(PartSpec):
    key_heads: int
    heads: int
    """Value heads, of which as many read each key head."""
    key: int
    """Numbers of a key,"""
    value: int
    """and of a value."""
    width: int
    """Tokens that a token sees through the convolution, itself included."""
    norm: NormSpec
    """Of what is read; results are normed without its offset."""

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key + self.heads * self.value

    @property
    def state(self) -> MatrixState:
        return MatrixState(self.channels, self.width - 1, self.heads, self.key, self.value, 2 * self.heads)

    def part(self, making: Making, layer: str) -> DeltaNet:
        return DeltaNet(self, making, layer)

    def indivisible(self, ranks: int) -> str | None:
        if self.key_heads % ranks:
            return f"the model's {self.key_heads} key heads of delta nets cannot be divided among {ranks} ranks"
        return None


class DeltaNet(Part):
    def __init__(self, spec: DeltaNetSpec, making: Making, layer: str) -> None:
        shard, hidden = making.shard, making.hidden_size
        self._spec, self._making, self._prefix = spec, making, f"{layer}.linear_attn"
        self._key_heads, self._heads = shard.span(spec.key_heads), shard.span(spec.heads)
        cuts = {name: shard.heads(self._key_heads, spec.key) for name in "qk"}
        cuts |= {name: shard.heads(self._heads, spec.value) for name in "vz"}
        cuts |= {name: shard.heads(self._heads, 1) for name in "ba"}
        keys, values = spec.key_heads * spec.key, spec.heads * spec.value
        sizes = {"q": keys, "k": keys, "v": values, "z": values, "b": spec.heads, "a": spec.heads}
        self._qkv, self._z, self._ba = (self._reads(hidden, names, sizes, cuts) for names in ("qkv", "z", "ba"))
        out, linear = f"{self._prefix}.out_proj", partial(JoinedLinear, making.scheme, adapters=making.adapters)
        self._out = linear(values, {out: hidden}, bias=False, cuts={out: shard.ins(values)})
        self._norm, self._result_norm = f"{layer}.input_layernorm", f"{self._prefix}.norm"
        self._norms = NormWeights({self._norm: hidden}, making.dtype, spec.norm)
        self._result_norms = NormWeights({self._result_norm: spec.value}, making.dtype, NormSpec(spec.norm.eps))
        self._weights: dict[str, Tensor] = {}

    def _reads(self, hidden: int, names: str, sizes: dict[str, int], cuts: dict[str, Cut]) -> JoinedLinear:
        """Linears of what is read, by the last letter of their names."""
        own = {name: f"{self._prefix}.in_proj_{name}" for name in names}
        parts, of_ranks = {own[name]: sizes[name] for name in names}, {own[name]: cuts[name] for name in names}
        making = self._making
        return JoinedLinear(making.scheme, hidden, parts, bias=False, adapters=making.adapters, cuts=of_ranks)

    def parameters(self) -> ParameterTable:
        linears = (self._qkv, self._z, self._ba, self._out)
        table = self._norms.parameters() | self._result_norms.parameters()
        for linear in linears:
            table |= linear.parameters()
        heads = partial(torch.narrow, dim=0, start=self._heads.start, length=len(self._heads))
        for name in ("A_log", "dt_bias"):
            put = partial(self._weights.__setitem__, name)
            table[f"{self._prefix}.{name}"] = Parameter((self._spec.heads,), torch.float32, put, heads)
        shape, put = (self._spec.channels, 1, self._spec.width), partial(self._weights.__setitem__, "conv")
        table[f"{self._prefix}.conv1d.weight"] = Parameter(shape, torch.float32, put, self._own_channels)
        return table

    def _own_channels(self, whole: Tensor) -> Tensor:
        """This rank's of the convolution's [channels, ...]."""
        spec, key_heads, heads = self._spec, self._key_heads, self._heads
        keys = spec.key_heads * spec.key
        q, k, v = whole.split([keys, keys, spec.heads * spec.value])
        own = [each[key_heads.start * spec.key : key_heads.stop * spec.key] for each in (q, k)]
        return torch.cat([*own, v[heads.start * spec.value : heads.stop * spec.value]])

    def normed(self) -> tuple[Normed, ...]:
        return (Normed(self._norm, self._spec.norm.offset, (self._qkv, self._z, self._ba)),)

    def slots(self, count: int, drafts: int) -> tuple[PageTensor, ...]:
        """The convolution's last columns; the matrices; and what of guesses these may have to take in later."""
        spec, making, heads = self._spec, self._making, len(self._heads)
        channels = 2 * len(self._key_heads) * spec.key + heads * spec.value
        wide = torch.float64 if making.dtype == torch.float64 else torch.float32
        return (
            PageTensor((count, spec.width - 1 + drafts, channels), making.dtype),
            PageTensor((count, heads, spec.key, spec.value), wide),
            PageTensor((count, drafts, channels + 2 * heads), making.dtype),
        )

    def forward(self, run: Operations, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        x, residual = self._norms.add(run, self._norm, x, residual)
        recent, matrices, guesses = step.pages
        context, metadata = step.context, step.metadata
        qkv, z, ba = (run.apply(each.packed, x, context) for each in (self._qkv, self._z, self._ba))
        qkv = run.short_conv(qkv, self._conv, Columns(None, 1, recent), metadata)
        found = run.recur(qkv, z, ba, self._rule, Matrices(matrices, guesses), metadata)
        if step.rows is not None:
            found, residual, context = found[step.rows], residual[step.rows], context.at(step.rows)
        return run.sum(run.apply(self._out.packed, found, context), self._making.shard.group), residual

    @cached_property
    def _conv(self) -> ShortConv:
        """Once its weights are there."""
        return ShortConv(self._weights["conv"][:, 0].t().contiguous(), None, gated=False)

    @cached_property
    def _rule(self) -> DeltaRule:
        """The same."""
        norm, spec = self._result_norms.get(self._result_norm), self._spec
        assert norm is not None
        rate, shift = -self._weights["A_log"].exp(), self._weights["dt_bias"].contiguous()
        return DeltaRule(rate, shift, norm, spec.norm.eps, len(self._key_heads), spec.key)
