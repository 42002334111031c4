"""A gated short convolution (LFM2: Liquid AI, 2025) in attention's place: each channel sees the last few tokens. What a
sequence keeps of these, its columns, kernels/recurrent/short_conv.py explains."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from quire.engine.checkpoint.parts.states import PIECE, ColumnState
from quire.engine.layers.norm import NormSpec
from quire.engine.layers.parameters import ParameterTable, parameters_of, rows_of
from quire.engine.layers.part import BuildContext, Normed, PageTensor, Step, SublayerSpec, uneven
from quire.engine.layers.recurrent.part import RecurrentPart
from quire.kernels.backend import Operations
from quire.kernels.recurrent.short_conv import Columns, ShortConv


@dataclass(frozen=True, slots=True)
class ShortConvSpec(SublayerSpec):
    channels: int
    width: int
    """Tokens that a token sees, itself included."""
    norm: NormSpec
    """Of what is read."""
    bias: bool = False
    """Of both linears and of the sum."""
    output_norm: bool = False
    """Norm of what it gives, before it joins the residual stream."""

    @property
    def state(self) -> ColumnState:
        return ColumnState(self.channels, self.width - 1)

    def part(self, making: BuildContext, layer: str) -> ShortConvolution:
        return ShortConvolution(self, making, layer)

    def indivisible(self, ranks: int) -> str | None:
        return uneven(self.channels, f"{self.channels} channels of convolutions", ranks)


class ShortConvolution(RecurrentPart):
    def __init__(self, spec: ShortConvSpec, making: BuildContext, layer: str) -> None:
        super().__init__(making, layer, "conv", spec.norm, output_norm=spec.output_norm)
        self._spec, channels, shard, hidden = spec, spec.channels, making.shard, making.hidden_size
        self._own = shard.span(channels)
        reads = {f"{name}_proj": (channels, shard.outs(channels)) for name in "bcx"}
        self._in = self._linear(hidden, reads, bias=spec.bias)
        self._out = self._linear(channels, {"out_proj": (hidden, shard.ins(channels))}, bias=spec.bias)

    def parameters(self) -> ParameterTable:
        channels, width = self._spec.channels, self._spec.width
        shapes: dict[str, tuple[int, ...]] = {"conv.weight": (channels, 1, width)}
        shapes |= {"conv.bias": (channels,)} if self._spec.bias else {}
        kept = self._kept(shapes, rows_of(self._own))
        return parameters_of(self._norms, self._in, self._out) | kept

    def normed(self) -> tuple[Normed, ...]:
        return (Normed(self._norm, self._spec.norm.offset, (self._in,)),)

    def pages(self, num_blocks: int) -> tuple[PageTensor, ...]:
        """The columns at the end of each piece, for whoever begins behind it."""
        pieces = self._making.backend.block_size // PIECE
        shape = (num_blocks, pieces, self._spec.width - 1, len(self._own))
        return (PageTensor(shape, self._making.dtype),)

    def slots(self, count: int, drafts: int) -> tuple[PageTensor, ...]:
        """Its last columns."""
        return (PageTensor((count, self._spec.width - 1 + drafts, len(self._own)), self._making.dtype),)

    @property
    def page_formula(self) -> str:
        pieces = self._making.backend.block_size // PIECE
        columns = (self._spec.width - 1) * pieces
        return f"{columns} columns x {len(self._own)} channels x {self._making.dtype.itemsize} B"

    def forward(self, run: Operations, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        normed, residual = self._norms.read_by((self._in,), run, self._norm, x, residual)
        bcx, (ends, recent) = run.apply(self._in.packed, normed, step.context), step.pages
        convolved = run.short_conv(bcx, self._conv, Columns(ends, PIECE, recent), step.metadata)
        return self._given(run, convolved, residual, step)

    @cached_property
    def _conv(self) -> ShortConv:
        """Once its weights are there."""
        return ShortConv(self._weights["conv.weight"][:, 0].t().contiguous(), self._weights.get("conv.bias"))
