from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from quire.engine.layers.schemes import (
    QuantizationScheme,
    TensorSpec,
    UnquantizedScheme,
    WrappedScheme,
    concat_present_biases,
)
from quire.engine.layers.shard import FULL_LINEAR, LinearSlice
from quire.kernels.backend import Backend, Linear, QuantizedEmbedding
from quire.kernels.int4_fit import GROUP_SIZE
from quire.kernels.quantized_tensors import Float8Weight, GroupedWeight, QuantizedWeight

Quantization = Literal["int8", "int4", "fp8"]

_CHUNK_WEIGHTS = 1 << 20
"""A float32 copy of a whole 16-bit tensor would take twice the tensor's memory."""
_MAX_FLOAT8 = 448.0
_MIN_SCALE = 2.0**-100


class OnlineQuantizedScheme(UnquantizedScheme):
    """8 bits with a scale per output, or 4 bits with scale and offset per 32 inputs. `dense_weight` is not quantized,
    because its caller would dequantize it immediately.
    """

    def __init__(self, backend: Backend, dtype: torch.dtype, quantization: Quantization) -> None:
        """`dtype` is that of activations and unquantized weights."""
        super().__init__(backend, dtype)
        self._quantization = quantization

    def linear_tensor_specs(
        self, linear: str, in_features: int, out_features: int, *, bias: bool
    ) -> dict[str, TensorSpec]:
        stored = super().linear_tensor_specs(linear, in_features, out_features, bias=bias)
        # Scales cover all inputs, so that they do not depend on the number of ranks.
        return stored | {"weight": replace(stored["weight"], early_slice_axes="outputs")}

    def pack_linears(
        self, linears: dict[str, dict[str, Tensor]], cuts: Mapping[str, LinearSlice], *, wide: bool
    ) -> Linear:
        if wide:  # the head: see Int8EmbeddingAndHeadScheme
            return super().pack_linears(linears, cuts, wide=wide)
        weights = [
            self._quantize_weight(each["weight"], name, cuts[name].remaining_slice("outputs"))
            for name, each in linears.items()
        ]
        return self._backend.pack_quantized(weights, concat_present_biases(linears), dtype=self._dtype, wide=wide)

    def _quantize_weight(self, weight: Tensor, linear: str, cut: LinearSlice) -> QuantizedWeight:
        if self._quantization == "int8":
            quantized: QuantizedWeight = quantize_int8(weight)
        else:
            quantized = quantize_float8(weight) if self._quantization == "fp8" else quantize_int4(weight, self._backend)
        return cut.slice_quantized(quantized, linear)


class Int8EmbeddingAndHeadScheme(WrappedScheme):
    def __init__(self, scheme: QuantizationScheme, backend: Backend, dtype: torch.dtype) -> None:
        super().__init__(scheme)
        self._backend = backend
        self._dtype = dtype

    def pack_linears(
        self, linears: dict[str, dict[str, Tensor]], cuts: Mapping[str, LinearSlice], *, wide: bool
    ) -> Linear:
        if not wide or not all(tensors.keys() == {"weight"} for tensors in linears.values()):
            return super().pack_linears(linears, cuts, wide=wide)
        weights = [quantize_int8(tensors["weight"]) for tensors in linears.values()]
        return self._backend.pack_quantized(weights, None, dtype=self._dtype, wide=wide)

    def pack_embedding(self, weight: Tensor, cut: LinearSlice = FULL_LINEAR, *, tied: bool) -> QuantizedEmbedding:
        return self._backend.pack_quantized_embedding(quantize_int8(weight), dtype=self._dtype, tied=tied)


def quantize_int8(weight: Tensor) -> GroupedWeight:
    """Quantizes [out, in] with a scale per output."""
    scales = _compute_scales(weight, 127)
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    for chunk in _row_chunks(weight):
        codes[chunk] = (weight[chunk].float() / scales[chunk]).round_().clamp_(-127, 127).to(torch.int8)
    return GroupedWeight(codes, scales)


def quantize_float8(weight: Tensor) -> Float8Weight:
    """Quantizes [out, in] to e4m3 with a scale per output."""
    scales = _compute_scales(weight, _MAX_FLOAT8)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for chunk in _row_chunks(weight):
        steps = (weight[chunk].float() / scales[chunk]).clamp_(-_MAX_FLOAT8, _MAX_FLOAT8)
        codes[chunk] = steps.to(torch.float8_e4m3fn)
    return Float8Weight(codes, scales, (1, weight.shape[1]))


def quantize_int4(weight: Tensor, backend: Backend) -> GroupedWeight:
    """Quantizes [out, in] with scale and offset per 32 inputs (kernels/int4_fit.py), or to int8 if the inputs are not a
    multiple of 32.
    """
    outs, inner = weight.shape
    if inner % GROUP_SIZE:
        return quantize_int8(weight)
    codes, scales, offsets = backend.fit_int4(weight.reshape(-1, GROUP_SIZE), zero_points=False)
    return GroupedWeight(codes.view(outs, -1), scales.view(outs, -1), offsets.view(outs, -1))


def _compute_scales(weight: Tensor, steps: float) -> Tensor:
    """Returns [out, 1], rounded to bfloat16 as in checkpoints."""
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    peak = torch.maximum(-low, high).float()
    return (peak / steps).bfloat16().float().clamp_min(_MIN_SCALE)


def _row_chunks(weight: Tensor) -> Iterator[slice]:
    chunk_rows = max(_CHUNK_WEIGHTS // weight.shape[1], 1)
    return (slice(begin, begin + chunk_rows) for begin in range(0, len(weight), chunk_rows))
