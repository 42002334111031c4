"""The common base of parts whose state has a fixed size for each sequence, whatever its length."""

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
from quire.engine.layers.part import BuildContext, PageTensor, Step, Sublayer, SublayerSpec
from quire.engine.layers.shard import Cut
from quire.kernels.backend import Operations
from quire.kernels.recurrent.recurrence import Matrices, Recurrence
from quire.kernels.recurrent.short_conv import Columns, ShortConv

CONV, CONV_BIAS = "conv1d.weight", "conv1d.bias"


class RecurrentPart(Sublayer):
    """It reads the residual stream through a norm. `_out` computes its output."""

    _out: JoinedLinear

    def __init__(
        self, making: BuildContext, layer: str, name: str, norm: NormSpec, *, output_norm: bool = False
    ) -> None:
        """`name`: the part's name in a checkpoint, after the layer's. `output_norm`: what it gives is normed too."""
        self._making, self._prefix = making, f"{layer}.{name}"
        self._norm, self._output_norm = f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"
        norms = [self._norm] + [self._output_norm] * output_norm
        self._norms = NormWeights(dict.fromkeys(norms, making.hidden_size), making.dtype, norm)
        self._weights: dict[str, Tensor] = {}
        """This rank's weights beside those of linears and norms, float32, by their names after the part's."""

    def _linear(self, inner: int, parts: Mapping[str, tuple[int, Cut]], *, bias: bool = False) -> JoinedLinear:
        """Joins linears with the same input. `parts`: by name after the part's, the outputs and this rank's cut."""
        sizes = {f"{self._prefix}.{name}": size for name, (size, _) in parts.items()}
        cuts = {f"{self._prefix}.{name}": cut for name, (_, cut) in parts.items()}
        making = self._making
        return JoinedLinear(making.scheme, inner, sizes, bias=bias, adapters=making.adapters, cuts=cuts)

    def _kept(self, shapes: Mapping[str, tuple[int, ...]], cut: Callable[[Tensor], Tensor] = whole) -> ParameterTable:
        """The parameters that fill `_weights`. `cut`: takes this rank's part of each."""
        return {
            f"{self._prefix}.{name}": held(self._weights, name, shape, torch.float32, cut=cut)
            for name, shape in shapes.items()
        }

    def _given(self, run: Operations, found: Tensor, residual: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """The part's output and the stream for the step's rows. `found`: the recurrence's result for all tokens."""
        context = step.context
        if step.rows is not None:
            found, residual, context = found[step.rows], residual[step.rows], context.at(step.rows)
        x = run.sum(run.apply(self._out.packed, found, context), self._making.shard.group)
        return self._norms.norm(run, self._output_norm, x), residual


@dataclass(frozen=True, slots=True)
class MatrixSpec(SublayerSpec):
    """The shape of a part that keeps a matrix [key, value] for each head and the last columns of a convolution."""

    heads: int
    key: int
    value: int
    width: int
    """How many tokens a token sees through the convolution, itself included."""
    norm: NormSpec
    """The norm of the part's input."""

    @property
    @abstractmethod
    def convolved(self) -> tuple[tuple[int, int], ...]:
        """(heads, channels of each head) of each input of the convolution. Ranks divide the heads."""

    @abstractmethod
    def beside(self, heads: int) -> int:
        """How many numbers these heads keep of a guess beside its column."""

    @property
    def channels(self) -> int:
        return sum(heads * size for heads, size in self.convolved)

    @property
    def state(self) -> MatrixState:
        beside = self.beside(self.heads)
        return MatrixState(self.channels, self.width - 1, self.heads, self.key, self.value, beside)


class MatrixPart(RecurrentPart):
    def __init__(self, spec: MatrixSpec, making: BuildContext, layer: str, name: str) -> None:
        super().__init__(making, layer, name, spec.norm)
        self._shape, self._heads = spec, making.shard.span(spec.heads)

    def _own_channels(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor [channels, ...] of the convolution."""
        kinds = self._shape.convolved
        parts = zip(whole.split([heads * size for heads, size in kinds]), self._spans, strict=True)
        return torch.cat([part[span.start : span.stop] for part, span in parts])

    @property
    def _spans(self) -> list[range]:
        """This rank's channels of each input of the convolution."""
        owns = [(self._making.shard.span(heads), size) for heads, size in self._shape.convolved]
        return [range(own.start * size, own.stop * size) for own, size in owns]

    def slots(self, count: int, drafts: int) -> tuple[PageTensor, ...]:
        """The convolution's last columns, the matrices, and the numbers of guesses that the matrices may need later."""
        shape, dtype, heads = self._shape, self._making.dtype, len(self._heads)
        channels = sum(len(span) for span in self._spans)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return (
            PageTensor((count, shape.width - 1 + drafts, channels), dtype),
            PageTensor((count, heads, shape.key, shape.value), wide),
            PageTensor((count, drafts, channels + shape.beside(heads)), dtype),
        )

    def _convolve(self, run: Operations, x: Tensor, step: Step) -> Tensor:
        return run.short_conv(x, self.conv, Columns(None, 1, step.pages[0]), step.metadata)

    def _recur(self, run: Operations, x: Tensor, z: Tensor, beside: Tensor, step: Step) -> Tensor:
        return run.recur(x, z, beside, self.rule, Matrices(*step.pages[1:]), step.metadata)

    @cached_property
    def conv(self) -> ShortConv:
        """Available once the weights are loaded."""
        weight = self._weights[CONV][:, 0].t().contiguous()
        return ShortConv(weight, self._weights.get(CONV_BIAS), gated=False)

    @cached_property
    @abstractmethod
    def rule(self) -> Recurrence:
        """Available once the weights are loaded."""
