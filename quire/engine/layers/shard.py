"""A rank's part of a model whose ranks compute every layer together (tensor parallelism: Shoeybi et al., 2019).

Query, key, value, gate and up have some of their outputs on each rank; what follows them, o_proj and down_proj, has the
inputs that these are, and the ranks' results are summed. Norms are whole on every rank, and so is the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import overload

import torch
from torch import Tensor

from quire.engine.errors import ConfigError
from quire.engine.layers.parameters import Early
from quire.kernels.attention.own import Own, whole
from quire.kernels.collective import Collective
from quire.kernels.quantized import Float8Weight, GroupedWeight, QuantizedWeight


@dataclass(frozen=True, slots=True)
class Cut:
    """What of a linear [out, in] a rank has: a range of its outputs or of its inputs; None: all."""

    outs: range | None = None
    ins: range | None = None
    biased: bool = True
    """Whether it is this rank that adds the bias where the ranks' results are summed."""

    def early(self, tensor: Tensor, which: Early) -> Tensor:
        """What is read of a tensor, where its rows are outputs and its columns inputs."""
        if which == "nothing":
            return tensor
        if tensor.ndim == 1:
            return self.bias(tensor)
        outs = _part(tensor, self.outs, 0)
        return outs if which == "outputs" else _part(outs, self.ins, 1)

    def late(self, which: Early) -> Cut:
        """What is still to cut of a weight that was cut when it was read."""
        return {"nothing": self, "outputs": replace(self, outs=None), "all": WHOLE_LINEAR}[which]

    def bias(self, tensor: Tensor) -> Tensor:
        return _part(tensor, self.outs, 0) if self.biased else torch.zeros_like(tensor)

    def deltas(self, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """An adapter's [rank, in] and [out, rank]."""
        return _part(down, self.ins, 1), _part(up, self.outs, 0)

    def sizes(self, outs: int, ins: int) -> tuple[int, int]:
        """(out, in) of the rank's part of a linear of so many."""
        return outs if self.outs is None else len(self.outs), ins if self.ins is None else len(self.ins)

    @overload
    def form(self, weight: QuantizedWeight, linear: str) -> QuantizedWeight: ...

    @overload
    def form(self, weight: QuantizedWeight | Tensor, linear: str) -> QuantizedWeight | Tensor: ...

    def form(self, weight: QuantizedWeight | Tensor, linear: str) -> QuantizedWeight | Tensor:
        """Of the whole weight; `linear`: its name. Raises ConfigError where groups of weights that share a scale would
        be torn apart."""
        if isinstance(weight, GroupedWeight):
            return self._grouped(weight, linear)
        if isinstance(weight, Float8Weight):
            return self._float8(weight, linear)
        return _part(_part(weight, self.outs, 0), self.ins, 1)

    def _grouped(self, weight: GroupedWeight, linear: str) -> GroupedWeight:
        if self.ins is not None and weight.order is not None:
            raise _cannot(linear, "its inputs are ordered by act-order (desc_act)")
        codes, scales = _part(weight.codes, self.outs, 0), _part(weight.scales, self.outs, 0)
        offsets = None if weight.offsets is None else _part(weight.offsets, self.outs, 0)
        if self.ins is not None:
            codes = _part(codes, _units(self.ins, 8 // weight.bits, linear), 1)
            if scales.shape[1] > 1:
                groups = _units(self.ins, weight.group, linear)
                scales = _part(scales, groups, 1)
                offsets = None if offsets is None else _part(offsets, groups, 1)
        return replace(weight, codes=codes.contiguous(), scales=scales, offsets=offsets)

    def _float8(self, weight: Float8Weight, linear: str) -> Float8Weight:
        codes, scales, block = weight.codes, weight.scales, list(weight.block)
        for axis, span in enumerate((self.outs, self.ins)):
            if span is not None:
                codes = _part(codes, span, axis)
                if weight.scales.shape[axis] > 1:
                    scales = _part(scales, _units(span, block[axis], linear), axis)
                else:
                    block[axis] = len(span)
        return Float8Weight(codes.contiguous(), scales, (block[0], block[1]))


WHOLE_LINEAR = Cut()


@dataclass(frozen=True, slots=True)
class Shard:
    """Which of a model's ranks this is."""

    rank: int = 0
    count: int = 1
    group: Collective | None = None
    """None: there is one rank, which has all."""
    divides_tokens: bool = False
    """Each rank keeps all heads of some of a sequence's tokens, not some heads of all: decode context parallelism."""

    def span(self, size: int) -> range:
        """This rank's part of so many things: consecutive, and of equal numbers where that is possible."""
        return _span(size, self.rank, self.count)

    def kv_heads(self, heads: int) -> range:
        """The key-value heads that this rank's query heads read; where there are more ranks than heads, several ranks
        have the same one. All, where ranks divide the tokens."""
        if self.divides_tokens:
            return range(heads)
        return self.span(heads) if heads >= self.count else range(first := self.rank * heads // self.count, first + 1)

    def outs(self, size: int) -> Cut:
        """Of a linear of so many outputs."""
        return Cut(outs=self.span(size)) if self.count > 1 else WHOLE_LINEAR

    def ins(self, size: int) -> Cut:
        """Of a linear of so many inputs, whose results are summed."""
        return Cut(ins=self.span(size), biased=self.rank == 0) if self.count > 1 else WHOLE_LINEAR

    def own(self, page: int) -> Own:
        """Which tokens of sequences this rank keeps, in pages of so many."""
        return Own(self.rank, self.count, page // self.count) if self.divides_tokens else whole(page)

    def heads(self, heads: range, head_dim: int) -> Cut:
        """Of a linear whose outputs are heads."""
        return Cut(outs=range(heads.start * head_dim, heads.stop * head_dim)) if self.count > 1 else WHOLE_LINEAR

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, on each of them. May overwrite x."""
        return x if self.group is None else self.group.sum(x)

    def gather(self, x: Tensor, size: int) -> Tensor:
        """The ranks' columns [R, len(span(size))] float32 side by side: [R, size], on the first rank; on others x."""
        if self.group is None:
            return x
        widths = [len(_span(size, rank, self.count)) for rank in range(self.count)]
        return self.group.gather(x, widths)

    def first(self, values: Tensor, places: Tensor, size: int) -> Tensor:
        """The first place of the largest of each of R rows of so many, [R] int64 on every rank. values [R] float32,
        places [R] int64: of this rank's part of the row, the same."""
        assert self.group is not None
        assert size <= 2**24, "float32 holds every place"
        own = torch.stack((values, (places + self.span(size).start).float()), 1)
        found = self.group.gather(own, [2] * self.count).unflatten(1, (-1, 2))  # of ranks but the first their own
        which = found[:, :, 0].argmax(1, keepdim=True)  # the first of equal ones, and so the lowest place
        return self.group.share(found[:, :, 1].gather(1, which).squeeze(1).long())


WHOLE = Shard()


def _span(size: int, rank: int, count: int) -> range:
    return range(size * rank // count, size * (rank + 1) // count)


def _part(tensor: Tensor, span: range | None, axis: int) -> Tensor:
    return tensor if span is None else tensor.narrow(axis, span.start, len(span))


def _units(span: range, unit: int, linear: str) -> range:
    """A range of inputs or outputs as one of units of several."""
    if span.start % unit or span.stop % unit:
        raise _cannot(linear, f"its weights share scales in groups of {unit}")
    return range(span.start // unit, span.stop // unit)


def _cannot(linear: str, why: str) -> ConfigError:
    return ConfigError(
        f"tensor_parallel_size: {linear} cannot be divided: {why}; use fewer ranks", param="tensor_parallel_size"
    )
