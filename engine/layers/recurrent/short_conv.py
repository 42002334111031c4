"""A gated short convolution (LFM2: Liquid AI, 2025) in attention's place: each channel sees the last few tokens. What a
sequence keeps of these, its columns, kernels/recurrent/short_conv.py explains."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from quire.engine.checkpoint.parts.states import PIECE, ColumnState
from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.norm import NormSpec, NormWeights
from quire.engine.layers.parameters import Parameter, ParameterTable
from quire.engine.layers.part import Making, Normed, PageTensor, Part, PartSpec, Step
from quire.kernels.backend import Operations, Pages
from quire.kernels.recurrent.short_conv import Columns, ShortConv


@dataclass(frozen=True, slots=True)
class ShortConvSpec(PartSpec):
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

    def part(self, making: Making, layer: str) -> ShortConvolution:
        return ShortConvolution(self, making, layer)

    def indivisible(self, ranks: int) -> str | None:
        if self.channels % ranks:
            return f"the model's {self.channels} channels of convolutions cannot be divided among {ranks} ranks"
        return None


class ShortConvolution(Part):
    def __init__(self, spec: ShortConvSpec, making: Making, layer: str) -> None:
        channels, shard, hidden = spec.channels, making.shard, making.hidden_size
        self._spec, self._making, self._own = spec, making, shard.span(channels)
        self._prefix = prefix = f"{layer}.conv"
        reads, out = [f"{prefix}.{name}_proj" for name in "bcx"], f"{prefix}.out_proj"
        linear = partial(JoinedLinear, making.scheme, bias=spec.bias, adapters=making.adapters)
        outs, ins = dict.fromkeys(reads, shard.outs(channels)), {out: shard.ins(channels)}
        self._in = linear(hidden, dict.fromkeys(reads, channels), cuts=outs)
        self._out = linear(channels, {out: hidden}, cuts=ins)
        self._norm, self._output_norm = f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"
        norms = [self._norm] + [self._output_norm] * spec.output_norm
        self._norms = NormWeights(dict.fromkeys(norms, hidden), making.dtype, spec.norm)
        self._weights: dict[str, Tensor] = {}

    def parameters(self) -> ParameterTable:
        table = self._norms.parameters() | self._in.parameters() | self._out.parameters()
        channels, own = self._spec.channels, self._own
        shapes = {"weight": (channels, 1, self._spec.width)} | ({"bias": (channels,)} if self._spec.bias else {})
        for name, shape in shapes.items():
            cut = partial(torch.narrow, dim=0, start=own.start, length=len(own))
            put = partial(self._weights.__setitem__, name)
            table[f"{self._prefix}.conv.{name}"] = Parameter(shape, torch.float32, put, cut)
        return table

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
        x, residual = self._norms.add(run, self._norm, x, residual)
        bcx, context = run.apply(self._in.packed, x, step.context), step.context
        convolved = run.short_conv(bcx, self._conv, self._columns(step.pages), step.metadata)
        if step.rows is not None:
            convolved, residual, context = convolved[step.rows], residual[step.rows], context.at(step.rows)
        x = run.sum(run.apply(self._out.packed, convolved, context), self._making.shard.group)
        return self._norms.norm(run, self._output_norm, x), residual

    @staticmethod
    def _columns(pages: Pages) -> Columns:
        ends, recent = pages
        return Columns(ends, PIECE, recent)

    @cached_property
    def _conv(self) -> ShortConv:
        """Once its weights are there."""
        return ShortConv(self._weights["weight"][:, 0].t().contiguous(), self._weights.get("bias"))
