"""A gated delta net (Yang et al., 2024; Qwen3-Next) in attention's place: what a sequence keeps is of one size, however
long it is. What is computed kernels/recurrent/delta_rule.py says, and kernels/recurrent/short_conv.py what stands
before it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from quire.engine.layers.norm import NormSpec, NormWeights
from quire.engine.layers.parameters import ParameterTable, parameters_of, rows_of
from quire.engine.layers.part import BuildContext, Normed, Step, uneven
from quire.engine.layers.recurrent.part import CONV, MatrixPart, MatrixSpec
from quire.kernels.backend import Operations
from quire.kernels.recurrent.delta_rule import DeltaRule


@dataclass(frozen=True, slots=True)
class DeltaNetSpec(MatrixSpec):
    """Its heads are value heads. Results are normed without the norm's offset."""

    key_heads: int
    """Each of them is read by as many value heads."""

    @property
    def convolved(self) -> tuple[tuple[int, int], ...]:
        """Queries, keys and values."""
        return (self.key_heads, self.key), (self.key_heads, self.key), (self.heads, self.value)

    def beside(self, heads: int) -> int:
        return 2 * heads

    def part(self, making: BuildContext, layer: str) -> DeltaNet:
        return DeltaNet(self, making, layer)

    def indivisible(self, ranks: int) -> str | None:
        return uneven(self.key_heads, f"{self.key_heads} key heads of delta nets", ranks)


class DeltaNet(MatrixPart):
    def __init__(self, spec: DeltaNetSpec, making: BuildContext, layer: str) -> None:
        super().__init__(spec, making, layer, "linear_attn")
        shard, hidden = making.shard, making.hidden_size
        self._spec, self._key_heads = spec, shard.span(spec.key_heads)
        keys, values = spec.key_heads * spec.key, spec.heads * spec.value
        key, value = (keys, shard.heads(self._key_heads, spec.key)), (values, shard.heads(self._heads, spec.value))
        head = (spec.heads, shard.heads(self._heads, 1))
        reads = {"q": key, "k": key, "v": value, "z": value, "b": head, "a": head}
        self._qkv, self._z, self._ba = (
            self._linear(hidden, {f"in_proj_{name}": reads[name] for name in names}) for names in ("qkv", "z", "ba")
        )
        self._out = self._linear(values, {"out_proj": (hidden, shard.ins(values))})
        self._result_norm = f"{self._prefix}.norm"
        self._result_norms = NormWeights({self._result_norm: spec.value}, making.dtype, NormSpec(spec.norm.eps))

    def parameters(self) -> ParameterTable:
        spec = self._spec
        table = parameters_of(self._norms, self._result_norms, self._qkv, self._z, self._ba, self._out)
        table |= self._kept(dict.fromkeys(("A_log", "dt_bias"), (spec.heads,)), rows_of(self._heads))
        return table | self._kept({CONV: (spec.channels, 1, spec.width)}, self._own_channels)

    def normed(self) -> tuple[Normed, ...]:
        return (Normed(self._norm, self._spec.norm.offset, (self._qkv, self._z, self._ba)),)

    def forward(self, run: Operations, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        reads = (self._qkv, self._z, self._ba)
        normed, residual = self._norms.read_by(reads, run, self._norm, x, residual)
        qkv, z, ba = (run.apply(each.packed, normed, step.context) for each in reads)
        return self._given(run, self._recur(run, self._convolve(run, qkv, step), z, ba, step), residual, step)

    @cached_property
    def rule(self) -> DeltaRule:
        norm, spec = self._result_norms.get(self._result_norm), self._spec
        assert norm is not None
        rate, shift = -self._weights["A_log"].exp(), self._weights["dt_bias"].contiguous()
        return DeltaRule(rate, shift, norm, spec.norm.eps, len(self._key_heads), spec.key)
