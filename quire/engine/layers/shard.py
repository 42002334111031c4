"""Tensor parallelism (Shoeybi et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import overload

import torch
from torch import Tensor

from quire.engine.common.errors import ConfigError
from quire.engine.layers.parameters import EarlySliceAxes
from quire.kernels.attention.context_shard import ContextShard, single_shard
from quire.kernels.collective import Collective
from quire.kernels.quantized_tensors import Float8Weight, GroupedWeight, QuantizedWeight


@dataclass(frozen=True, slots=True)
class LinearSlice:
    """A rank's part of a linear [out, in]. A range of None means all."""

    output_range: range | None = None
    input_range: range | None = None
    adds_bias: bool = True
    """Only one of the summing ranks adds the bias."""

    def slice_tensor_on_read(self, tensor: Tensor, which: EarlySliceAxes) -> Tensor:
        """Rows are outputs, columns are inputs."""
        if which == "nothing":
            return tensor
        if tensor.ndim == 1:
            return self.slice_bias(tensor)
        outs = _narrow_axis(tensor, self.output_range, 0)
        return outs if which == "outputs" else _narrow_axis(outs, self.input_range, 1)

    def remaining_slice(self, which: EarlySliceAxes) -> LinearSlice:
        return {"nothing": self, "outputs": replace(self, output_range=None), "all": FULL_LINEAR}[which]

    def slice_bias(self, tensor: Tensor) -> Tensor:
        return _narrow_axis(tensor, self.output_range, 0) if self.adds_bias else torch.zeros_like(tensor)

    def slice_lora(self, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """`down` [rank, in], `up` [out, rank]."""
        return _narrow_axis(down, self.input_range, 1), _narrow_axis(up, self.output_range, 0)

    def sliced_sizes(self, outs: int, ins: int) -> tuple[int, int]:
        return outs if self.output_range is None else len(self.output_range), ins if self.input_range is None else len(
            self.input_range
        )

    @overload
    def slice_quantized(self, weight: QuantizedWeight, linear: str) -> QuantizedWeight: ...

    @overload
    def slice_quantized(self, weight: QuantizedWeight | Tensor, linear: str) -> QuantizedWeight | Tensor: ...

    def slice_quantized(self, weight: QuantizedWeight | Tensor, linear: str) -> QuantizedWeight | Tensor:
        """Raises ConfigError if this slice would split a group that has one scale."""
        if isinstance(weight, GroupedWeight):
            return self._slice_grouped(weight, linear)
        if isinstance(weight, Float8Weight):
            return self._slice_float8(weight, linear)
        return _narrow_axis(_narrow_axis(weight, self.output_range, 0), self.input_range, 1)

    def _slice_grouped(self, weight: GroupedWeight, linear: str) -> GroupedWeight:
        if self.input_range is not None and weight.input_order is not None:
            raise _indivisible_error(linear, "its inputs are ordered by act-order (desc_act)")
        codes, scales = (
            _narrow_axis(weight.codes, self.output_range, 0),
            _narrow_axis(weight.scales, self.output_range, 0),
        )
        offsets = None if weight.offsets is None else _narrow_axis(weight.offsets, self.output_range, 0)
        groups = None
        if self.input_range is not None:
            codes = _narrow_axis(codes, _span_in_units(self.input_range, 8 // weight.bits, linear), 1)
            if scales.shape[1] > 1:
                groups = _span_in_units(self.input_range, weight.group_size, linear)
                scales = _narrow_axis(scales, groups, 1)
                offsets = None if offsets is None else _narrow_axis(offsets, groups, 1)
        nested = tuple(
            narrowed for each in weight.nested if (narrowed := each.narrow(self.output_range, groups)) is not None
        )
        return replace(weight, codes=codes.contiguous(), scales=scales, offsets=offsets, nested=nested)

    def _slice_float8(self, weight: Float8Weight, linear: str) -> Float8Weight:
        codes = weight.codes
        scales = weight.scales
        block = list(weight.scale_block)
        for axis, span in enumerate((self.output_range, self.input_range)):
            if span is not None:
                codes = _narrow_axis(codes, span, axis)
                if weight.scales.shape[axis] > 1:
                    scales = _narrow_axis(scales, _span_in_units(span, block[axis], linear), axis)
                else:
                    block[axis] = len(span)
        return Float8Weight(codes.contiguous(), scales, (block[0], block[1]))


FULL_LINEAR = LinearSlice()
_EXPERTS = ".experts."


@dataclass(frozen=True, slots=True)
class ModelShard:
    rank: int = 0
    world_size: int = 1
    group: Collective | None = None
    is_context_parallel: bool = False

    def rank_span(self, size: int) -> range:
        return _rank_span(size, self.rank, self.world_size)

    def kv_head_span(self, heads: int) -> range:
        """With more ranks than heads, several ranks have the same head."""
        if self.is_context_parallel:
            return range(heads)
        return (
            self.rank_span(heads)
            if heads >= self.world_size
            else range(first := self.rank * heads // self.world_size, first + 1)
        )

    def output_slice(self, size: int) -> LinearSlice:
        return LinearSlice(output_range=self.rank_span(size)) if self.world_size > 1 else FULL_LINEAR

    def input_slice(self, size: int) -> LinearSlice:
        return (
            LinearSlice(input_range=self.rank_span(size), adds_bias=self.rank == 0)
            if self.world_size > 1
            else FULL_LINEAR
        )

    def context_shard(self, block_size: int) -> ContextShard:
        return (
            ContextShard(self.rank, self.world_size, block_size // self.world_size)
            if self.is_context_parallel
            else single_shard(block_size)
        )

    def head_slice(self, heads: range, head_dim: int) -> LinearSlice:
        return (
            LinearSlice(output_range=range(heads.start * head_dim, heads.stop * head_dim))
            if self.world_size > 1
            else FULL_LINEAR
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """May overwrite x."""
        return x if self.group is None else self.group.all_reduce(x)

    def gather_columns(self, x: Tensor, size: int) -> Tensor:
        """Joins the ranks' x [R, n] float32 to [R, size] on the first rank; other ranks return x. Needs a group."""
        assert self.group is not None
        widths = [len(_rank_span(size, rank, self.world_size)) for rank in range(self.world_size)]
        return self.group.gather_columns(x, widths)

    def gather_argmax(self, values: Tensor, indices: Tensor, size: int) -> Tensor:
        """Returns the index of each row's first maximum over all ranks, [R] int64 on every rank. `values` [R] float32
        and `indices` [R] int64 are this rank's maxima.
        """
        assert self.group is not None
        assert size <= 2**24, "float32 holds every place"
        candidates = torch.stack((values, (indices + self.rank_span(size).start).float()), 1)
        gathered = self.group.gather_columns(candidates, [2] * self.world_size).unflatten(
            1, (-1, 2)
        )  # other ranks get their own candidates
        best_rank = gathered[:, :, 0].argmax(1, keepdim=True)  # ties: lowest rank, so lowest index
        return self.group.broadcast(gathered[:, :, 1].gather(1, best_rank).squeeze(1).long())


UNSHARDED = ModelShard()


def _rank_span(size: int, rank: int, world_size: int) -> range:
    return range(size * rank // world_size, size * (rank + 1) // world_size)


def _narrow_axis(tensor: Tensor, span: range | None, axis: int) -> Tensor:
    return tensor if span is None else tensor.narrow(axis, span.start, len(span))


def _span_in_units(span: range, unit: int, linear: str) -> range:
    if span.start % unit or span.stop % unit:
        raise _indivisible_error(linear, f"its weights share scales in groups of {unit}")
    return range(span.start // unit, span.stop // unit)


def _indivisible_error(linear: str, reason: str) -> ConfigError:
    whole = ", or --enable-expert-parallel, which gives each rank whole experts" if _EXPERTS in linear else ""
    return ConfigError(
        f"tensor_parallel_size: {linear} cannot be divided: {reason}; use fewer ranks{whole}",
        param="tensor_parallel_size",
    )
