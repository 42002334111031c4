"""What parts have in common that keep a state of one size of each sequence, however long it is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quire.engine.checkpoint.parts.states import MatrixState
from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.norm import NormSpec, NormWeights
from quire.engine.layers.parameters import ParameterTable, held, whole
from quire.engine.layers.part import Making, PageTensor, Part, PartSpec, Step
from quire.engine.layers.shard import Cut
from quire.kernels.backend import Operations
from quire.kernels.recurrent.recurrence import Matrices, Recurrence
from quire.kernels.recurrent.short_conv import Columns, ShortConv

CONV, CONV_BIAS = "conv1d.weight", "conv1d.bias"


class RecurrentPart(Part):
    """It reads the norm of the residual stream; `_out` makes what it gives."""

    _out: JoinedLinear

    def __init__(self, making: Making, layer: str, name: str, norm: NormSpec) -> None:
        """`name`: of the part in a checkpoint, behind the layer's."""
        self._making, self._prefix, self._norm = making, f"{layer}.{name}", f"{layer}.input_layernorm"
        self._norms = NormWeights({self._norm: making.hidden_size}, making.dtype, norm)
        self._weights: dict[str, Tensor] = {}
        """Those that no linear and no norm has, by their names behind the part's: this rank's, float32."""

    def _linear(self, inner: int, parts: Mapping[str, tuple[int, Cut]], *, bias: bool = False) -> JoinedLinear:
        """Linears of one input as one: outputs, and what of them is this rank's, by the names behind the part's."""
        sizes = {f"{self._prefix}.{name}": size for name, (size, _) in parts.items()}
        cuts = {f"{self._prefix}.{name}": cut for name, (_, cut) in parts.items()}
        making = self._making
        return JoinedLinear(making.scheme, inner, sizes, bias=bias, adapters=making.adapters, cuts=cuts)

    def _kept(self, shapes: Mapping[str, tuple[int, ...]], cut: Callable[[Tensor], Tensor] = whole) -> ParameterTable:
        """What fills `_weights`, by name; `cut`: this rank's of each."""
        return {
            f"{self._prefix}.{name}": held(self._weights, name, shape, torch.float32, cut=cut)
            for name, shape in shapes.items()
        }

    def _given(self, run: Operations, found: Tensor, residual: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """What the part gives, of what was found for all tokens, and the stream: of the step's rows alone."""
        context = step.context
        if step.rows is not None:
            found, residual, context = found[step.rows], residual[step.rows], context.at(step.rows)
        return run.sum(run.apply(self._out.packed, found, context), self._making.shard.group), residual


@dataclass(frozen=True, slots=True)
class MatrixSpec(PartSpec):
    """The shape of a part that keeps a matrix [key, value] for each head, and the last columns of a convolution."""

    heads: int
    key: int
    value: int
    width: int
    """Tokens that a token sees through the convolution, itself included."""
    norm: NormSpec
    """Of what is read."""

    @property
    @abstractmethod
    def convolved(self) -> tuple[tuple[int, int], ...]:
        """(heads, channels of each) of what goes through the convolution, side by side. Ranks divide the heads."""

    @abstractmethod
    def beside(self, heads: int) -> int:
        """Numbers of a guess that are kept beside its column, by so many of the heads."""

    @property
    def channels(self) -> int:
        return sum(heads * size for heads, size in self.convolved)

    @property
    def state(self) -> MatrixState:
        beside = self.beside(self.heads)
        return MatrixState(self.channels, self.width - 1, self.heads, self.key, self.value, beside)


class MatrixPart(RecurrentPart):
    def __init__(self, spec: MatrixSpec, making: Making, layer: str, name: str) -> None:
        super().__init__(making, layer, name, spec.norm)
        self._shape, self._heads = spec, making.shard.span(spec.heads)

    def _own_channels(self, whole: Tensor) -> Tensor:
        """This rank's of the convolution's [channels, ...]."""
        kinds = self._shape.convolved
        parts = zip(whole.split([heads * size for heads, size in kinds]), self._spans, strict=True)
        return torch.cat([part[span.start : span.stop] for part, span in parts])

    @property
    def _spans(self) -> list[range]:
        """This rank's channels of each kind."""
        owns = [(self._making.shard.span(heads), size) for heads, size in self._shape.convolved]
        return [range(own.start * size, own.stop * size) for own, size in owns]

    def slots(self, count: int, drafts: int) -> tuple[PageTensor, ...]:
        """The convolution's last columns; the matrices; and what of guesses these may have to take in later."""
        shape, dtype, heads = self._shape, self._making.dtype, len(self._heads)
        channels = sum(len(span) for span in self._spans)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return (
            PageTensor((count, shape.width - 1 + drafts, channels), dtype),
            PageTensor((count, heads, shape.key, shape.value), wide),
            PageTensor((count, drafts, channels + shape.beside(heads)), dtype),
        )

    def _convolve(self, run: Operations, x: Tensor, step: Step) -> Tensor:
        return run.short_conv(x, self._conv, Columns(None, 1, step.pages[0]), step.metadata)

    def _recur(self, run: Operations, x: Tensor, z: Tensor, beside: Tensor, step: Step) -> Tensor:
        return run.recur(x, z, beside, self._rule, Matrices(*step.pages[1:]), step.metadata)

    @cached_property
    def _conv(self) -> ShortConv:
        """Once its weights are there."""
        weight = self._weights[CONV][:, 0].t().contiguous()
        return ShortConv(weight, self._weights.get(CONV_BIAS), gated=False)

    @cached_property
    @abstractmethod
    def _rule(self) -> Recurrence:
        """The same."""
