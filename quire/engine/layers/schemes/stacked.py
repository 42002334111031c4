from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quire.engine.layers.schemes import QuantizationScheme, UnquantizedScheme, WrappedScheme, concat_present_biases
from quire.engine.layers.shard import LinearSlice
from quire.kernels.backend import Linear

_ALIGNMENT = 16
"""Bytes, which kernels assume of every weight's beginning."""


class StackedExpertScheme(WrappedScheme):
    """Writes an expert's weight into its part of one tensor for all experts of a layer. The first expert allocates this
    tensor, so loading needs no more memory than separate tensors and the one being written.
    """

    def __init__(self, scheme: QuantizationScheme, stacks: dict[tuple[str, ...], Tensor], place: int, count: int):
        """`stacks`: by the linears' last names, shared by a layer's experts."""
        super().__init__(scheme)
        self._stacks = stacks
        self._place = place
        self._count = count

    def pack_linears(
        self, linears: dict[str, dict[str, Tensor]], cuts: Mapping[str, LinearSlice], *, wide: bool
    ) -> Linear:
        weights = [each["weight"] for each in linears.values()]
        if weights[0].shape[1] * weights[0].itemsize % _ALIGNMENT:
            return super().pack_linears(linears, cuts, wide=wide)
        names = tuple(name.rpartition(".")[2] for name in linears)
        if names not in self._stacks:
            outs = sum(len(each) for each in weights)
            self._stacks[names] = weights[0].new_empty((self._count, outs, weights[0].shape[1]))
        weight = self._stacks[names][self._place]
        torch.cat(weights, out=weight)
        bias = concat_present_biases(linears)
        fused = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        return super().pack_linears({".".join(names): fused}, cuts, wide=wide)


def make_expert_schemes(scheme: QuantizationScheme, count: int, *, stacks: bool) -> Sequence[QuantizationScheme]:
    """Quantized weights and those of streamed layers are not stacked."""
    if not stacks or type(scheme) is not UnquantizedScheme:
        return [scheme] * count
    stacked_weights: dict[tuple[str, ...], Tensor] = {}
    return [StackedExpertScheme(scheme, stacked_weights, place, count) for place in range(count)]
