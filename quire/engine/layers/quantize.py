"""Weights of 8 or 4 bits made of floating-point ones while they are loaded (--quantization)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from quire.engine.layers.schemes import OtherScheme, Scheme, Stored, Unquantized, joined_bias
from quire.engine.layers.shard import WHOLE_LINEAR, Cut
from quire.kernels.backend import Backend, Linear, Table
from quire.kernels.fit import GROUP
from quire.kernels.quantized import Float8Weight, GroupedWeight, QuantizedWeight

Quantization = Literal["int8", "int4", "fp8"]

_PIECE = 1 << 20
"""Weights that are quantized at once, or one output's: a float32 copy of all would be twice the tensor."""
_LARGEST_FLOAT8 = 448.0
_SMALLEST = 2.0**-100
"""The smallest scale."""


class AtLoad(Unquantized):
    """Linears in 8 bits, integers or floats, with a scale for each output, or in 4 bits with a scale and an offset for
    each 32 inputs. `dense` has all bits: nothing would be saved by few that are expanded at once."""

    def __init__(self, backend: Backend, dtype: torch.dtype, quantization: Quantization) -> None:
        """dtype: of activations, and of what is not quantized."""
        super().__init__(backend, dtype)
        self._quantization = quantization

    def tensors(self, linear: str, in_features: int, out_features: int, *, bias: bool) -> dict[str, Stored]:
        stored = super().tensors(linear, in_features, out_features, bias=bias)
        # Scales are those of all of an output's weights: so they are the same on any number of ranks.
        return stored | {"weight": replace(stored["weight"], early="outputs")}

    def pack(self, linears: dict[str, dict[str, Tensor]], cuts: Mapping[str, Cut], *, wide: bool) -> Linear:
        if wide:  # the head: see Int8Table
            return super().pack(linears, cuts, wide=wide)
        weights = [self._form(each["weight"], name, cuts[name].late("outputs")) for name, each in linears.items()]
        return self._backend.pack_quantized(weights, joined_bias(linears), dtype=self._dtype, wide=wide)

    def _form(self, weight: Tensor, linear: str, cut: Cut) -> QuantizedWeight:
        if self._quantization == "int8":
            form: QuantizedWeight = int8(weight)
        else:
            form = float8(weight) if self._quantization == "fp8" else int4(weight, self._backend)
        return cut.form(form, linear)


class Int8Table(OtherScheme):
    """Another scheme, but for the embedding and the head, which are made 8-bit integers where they are
    floating-point numbers."""

    def __init__(self, scheme: Scheme, backend: Backend, dtype: torch.dtype) -> None:
        super().__init__(scheme)
        self._backend = backend
        self._dtype = dtype

    def pack(self, linears: dict[str, dict[str, Tensor]], cuts: Mapping[str, Cut], *, wide: bool) -> Linear:
        if not wide or not all(tensors.keys() == {"weight"} for tensors in linears.values()):
            return super().pack(linears, cuts, wide=wide)
        weights = [int8(tensors["weight"]) for tensors in linears.values()]
        return self._backend.pack_quantized(weights, None, dtype=self._dtype, wide=wide)

    def pack_table(self, weight: Tensor, cut: Cut = WHOLE_LINEAR, *, tied: bool) -> Table:
        return self._backend.pack_table(int8(weight), dtype=self._dtype, tied=tied)


def int8(weight: Tensor) -> GroupedWeight:
    """[out, in] in 8 bits, with one scale for each output: its largest weight is 127 steps."""
    scales = _scales(weight, 127)
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    for piece in _pieces(weight):
        codes[piece] = (weight[piece].float() / scales[piece]).round_().clamp_(-127, 127).to(torch.int8)
    return GroupedWeight(codes, scales)


def float8(weight: Tensor) -> Float8Weight:
    """[out, in] in 8-bit floats, with one scale for each output: its largest weight is the largest of them."""
    scales = _scales(weight, _LARGEST_FLOAT8)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for piece in _pieces(weight):
        steps = (weight[piece].float() / scales[piece]).clamp_(-_LARGEST_FLOAT8, _LARGEST_FLOAT8)
        codes[piece] = steps.to(torch.float8_e4m3fn)
    return Float8Weight(codes, scales, (1, weight.shape[1]))


def int4(weight: Tensor, backend: Backend) -> GroupedWeight:
    """[out, in] in 4 bits, with a scale and an offset for each group of 32 inputs; in 8 bits where inputs cannot be
    grouped so. kernels/fit.py says how they are found."""
    outs, inner = weight.shape
    if inner % GROUP:
        return int8(weight)
    codes, scales, offsets = backend.fit_int4(weight.reshape(-1, GROUP), zero_points=False)
    return GroupedWeight(codes.view(outs, -1), scales.view(outs, -1), offsets.view(outs, -1))


def _scales(weight: Tensor, steps: float) -> Tensor:
    """[out, 1]: the largest weight of each output is so many steps. They have the 8 bits of bfloat16, as in a
    checkpoint."""
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    peak = torch.maximum(-low, high).float()
    return (peak / steps).bfloat16().float().clamp_min(_SMALLEST)


def _pieces(weight: Tensor) -> Iterator[slice]:
    outs = max(_PIECE // weight.shape[1], 1)
    return (slice(begin, begin + outs) for begin in range(0, len(weight), outs))
