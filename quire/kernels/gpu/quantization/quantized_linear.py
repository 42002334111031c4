from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.backend import LinearContext, QuantizedEmbedding
from quire.kernels.gpu import triton_launch_sizes
from quire.kernels.gpu.quantization import activation_rounding, torch_matmul, weight_trial
from quire.kernels.gpu.quantization import triton_quantized as kernels
from quire.kernels.gpu.quantization.activation_rounding import EightBitRounding
from quire.kernels.gpu.quantization.weight_packing import (
    SCALE_BLOCK,
    PackedWeight,
    interleave_output_rows,
    merge_adjacent_weights,
    pack_float8,
    pack_group_quantized,
)
from quire.kernels.gpu.triton_launch_sizes import cdiv
from quire.kernels.quantized_tensors import (
    ActivationRounding,
    Activations,
    Float8Weight,
    QuantizedWeight,
    RoundedActivations,
    RoundedInputLinear,
)

log = logging.getLogger("quire.kernels")

_MAX_FEW_ROWS, _MAX_SOME_ROWS = 16, 64
_MIN_DEQUANTIZED_ROWS = 256
"""From this many rows on, weights are dequantized for PyTorch's 16-bit product, unless x is rounded."""
_LONG_STEP, _LONG_STEP_BYTES = 64, 112 * 1024
"""Words per long step, and the bytes of shared memory that three such steps take with _MAX_SOME_ROWS rows."""
_COLUMN_BLOCK = 1024
_PROGRAMS_PER_PROCESSOR = 4
_MIN_STEPS = 4
"""Minimum steps in each part of a split inner dimension."""


class TritonQuantizedLinear(RoundedInputLinear):
    """The parts have the same input. Their outputs are concatenated."""

    def __init__(
        self,
        parts: Sequence[PackedWeight],
        bias: Tensor | None,
        *,
        wide: bool,
        fixed: bool,
        products: Sequence[torch_matmul.TorchMatmulKind | None] = (),
        fuses: bool = False,
    ) -> None:
        """fixed: batch-invariant. products: each part's PyTorch product for many rows."""
        self.parts = parts
        self._matmuls = products or [None] * len(parts)
        self.bias = bias
        self.has_float32_output = wide
        self.dequantized_bytes = torch_matmul.DEQUANTIZED_BYTES
        self._has_fixed_tiles = fixed
        self._outs = sum(each.out_features for each in parts)
        parts_and_matmuls = zip(parts, self._matmuls, strict=True)
        self._roundings = tuple(
            None if part.input_order is not None else _activation_rounding(part, product)
            for part, product in parts_and_matmuls
        )
        self._fused_roundings = self._roundings if fuses else (None,) * len(parts)
        self._unrounded = (None,) * len(parts)

    @property
    def offloadable_tensors(self) -> list[Tensor]:
        large = [tensor for each in self.parts for tensor in (each.codes, each.scales, each.offsets)]
        return [each for each in large if each is not None]

    def input_roundings(self, rows: int) -> tuple[ActivationRounding | None, ...]:
        return self._fused_roundings if self._should_round(rows) else self._unrounded

    def _should_round(self, rows: int) -> bool:
        return self._has_fixed_tiles or rows > _MAX_FEW_ROWS

    def __call__(self, x: Activations, context: LinearContext) -> Tensor:
        rows, dtype = len(x), torch.float32 if self.has_float32_output else x.dtype
        rounded_inputs = (
            {x.rounding: x} if isinstance(x, RoundedActivations) else dict[ActivationRounding, RoundedActivations]()
        )
        whole = x.unrounded if isinstance(x, RoundedActivations) else x.contiguous()
        out = None if len(self.parts) == 1 and rows else torch.empty((rows, self._outs), dtype=dtype, device=x.device)
        product, first = out, 0
        for number, form in enumerate(
            (self._roundings if self._should_round(rows) else self._unrounded) if rows else ()
        ):
            end = first + self.parts[number].out_features
            bias = None if self.bias is None else self.bias[first:end]
            to = None if out is None else out[:, first:end]
            if form is None:
                assert whole is not None
                product = self._multiply_part(number, whole, bias, dtype, to)
            else:
                if form not in rounded_inputs:
                    assert whole is not None
                    rounded_inputs[form] = form.round_rows(whole)
                product = self._multiply_rounded(number, rounded_inputs[form], bias, dtype, to)
            first = end
        result = product if out is None else out
        assert result is not None
        return result

    def _multiply_part(
        self, number: int, x: Tensor, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None
    ) -> Tensor:
        """`out` may be columns of a wider tensor."""
        part, rows = self.parts[number], len(x)
        x = x if part.input_order is None else x.index_select(1, part.input_order)
        if self._should_round(rows) and (form := _activation_rounding(part, self._matmuls[number])) is not None:
            return self._multiply_rounded(number, form.round_rows(x), bias, dtype, out)
        out = x.new_empty((rows, part.out_features), dtype=dtype) if out is None else out
        many = not self._has_fixed_tiles and not self.has_float32_output and rows >= _MIN_DEQUANTIZED_ROWS
        if many and x.dtype != torch.float32:
            torch_matmul.multiply_dequantized(part, x, bias, out, self.dequantized_bytes)
        else:
            multiply_unrounded(part, x, bias, out, fixed=self._has_fixed_tiles)
        return out

    def _multiply_rounded(
        self, number: int, x: RoundedActivations, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None
    ) -> Tensor:
        part, product = self.parts[number], self._matmuls[number]
        if product is not None:
            product_out = torch_matmul.multiply_rounded(part, product, x, bias)
            return product_out if out is None else out.copy_(product_out)
        if out is None:
            out = torch.empty((len(x), part.out_features), dtype=dtype, device=x.device)
        _multiply_rounded_codes(part, x, bias, out, self._has_fixed_tiles)
        return out


def _activation_rounding(part: PackedWeight, product: torch_matmul.TorchMatmulKind | None) -> EightBitRounding | None:
    """Return how x is rounded if it has many rows."""
    if not part.rounds_activations:
        return None
    integers = part.kernel_form[0] == kernels.INTEGERS
    return EightBitRounding(
        integers, product is None or product == torch_matmul.TorchMatmulKind.FLOAT8_BLOCK_SCALED, part.pair_distance
    )


def pack_quantized(
    weights: Sequence[QuantizedWeight], bias: Tensor | None, *, dtype: torch.dtype, wide: bool, fixed: bool
) -> TritonQuantizedLinear | None:
    """Return None if a format is unsupported or fails its trial on this GPU."""
    if weights[0].codes.is_cuda:
        where = (dtype, weights[0].codes.device, wide, fixed)
        for weight in weights:
            if (
                reason := weight_trial.trial_failure_reason(
                    weight_trial.quantized_format(weight), *where, pack_without_trial
                )
            ) is not None:
                log.warning(
                    "quantized weights are dequantized to %s, because Triton's kernels cannot be used: %s",
                    dtype,
                    reason,
                )
                return None
    return pack_without_trial(weights, bias, dtype=dtype, wide=wide, fixed=fixed)


def pack_without_trial(
    weights: Sequence[QuantizedWeight], bias: Tensor | None, *, dtype: torch.dtype, wide: bool, fixed: bool
) -> TritonQuantizedLinear | None:
    parts: list[PackedWeight] = []
    for weight in weights:
        if isinstance(weight, Float8Weight):
            packed = pack_float8(weight, native=can_multiply_float8(weight.codes))
        else:
            packed = pack_group_quantized(weight)
        if packed is None:
            return None
        parts.append(packed)
    parts = [interleave_output_rows(each) for each in merge_adjacent_weights(parts)]
    products = [None if fixed or wide else torch_matmul.choose_matmul(each, dtype) for each in parts]
    forms = {_activation_rounding(*each) for each in zip(parts, products, strict=True)} - {None}
    fuses = all(
        activation_rounding.can_fuse(form, parts[0].in_features, dtype, parts[0].codes.device) for form in forms if form
    )
    return TritonQuantizedLinear(parts, bias, wide=wide, fixed=fixed, products=products, fuses=fuses)


def pack_quantized_embedding(
    weight: QuantizedWeight, *, dtype: torch.dtype, tied: bool, fixed: bool
) -> QuantizedEmbedding | None:
    linear = pack_quantized([weight], None, dtype=dtype, wide=True, fixed=fixed)
    if linear is None or linear.parts[0].input_order is not None:
        return None
    (part,) = linear.parts
    return QuantizedEmbedding(lambda ids: look_up_rows(part, ids, dtype), linear if tied else None)


def can_multiply_float8(codes: Tensor) -> bool:
    """Also true on the CPU, for Triton's interpreter."""
    return not codes.is_cuda or torch.cuda.get_device_capability(codes.device) >= (8, 9)


class MatmulTiles(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def choose_matmul_tiles(rows: int, dtype: torch.dtype, *, fixed: bool, part: PackedWeight | None = None) -> MatmulTiles:
    """Return small tiles for few rows, whose time goes to reading weights. fixed: the same for any `rows`. part: weight
    to decode. Measured on an H100.
    """
    if dtype == torch.float32:  # no tensor cores
        return MatmulTiles(32, 64, 4, 2)
    nibbles = False
    long = False
    device = None
    if part is not None:
        nibbles, device = part.codes_per_word == 4, part.codes.device.index
        long = nibbles and part.inputs_per_step >= _LONG_STEP
    if rows <= _MAX_FEW_ROWS and not fixed:
        return MatmulTiles(16, 128 if nibbles and not long else 64, 4, 3 if nibbles else 4)
    if rows <= 2 * _MAX_FEW_ROWS and not fixed and part is not None:
        return MatmulTiles(32, 64, 4, 3)
    if fixed or rows <= _MAX_SOME_ROWS or nibbles:
        fits = not long or triton_launch_sizes.shared_memory_bytes(device) >= _LONG_STEP_BYTES
        return MatmulTiles(64, 64, 4, 3 if fits else 2)
    return MatmulTiles(128, 128, 8, 2) if dtype.itemsize == 1 else MatmulTiles(128, 64, 8, 2)


def split_k_count_and_length(part: PackedWeight, tiles: MatmulTiles) -> tuple[int, int]:
    """The length is in words. Neither number depends on x. The sums that the parts store take less memory than the
    weights.
    """
    steps, columns = cdiv(part.words_per_output, part.inputs_per_step), cdiv(part.out_features, tiles.block_n)
    wanted = cdiv(_PROGRAMS_PER_PROCESSOR * triton_launch_sizes.num_multiprocessors(part.codes.device.index), columns)
    count = max(1, min(wanted, steps // _MIN_STEPS, part.words_per_output * part.codes.itemsize // (8 * tiles.block_m)))
    length = cdiv(steps, count) * part.inputs_per_step
    return cdiv(part.words_per_output, length), length


def multiply_unrounded(part: PackedWeight, x: Tensor, bias: Tensor | None, out: Tensor, *, fixed: bool) -> None:
    """Write x [rows, in] @ weight.T + bias to `out`, which may be columns of a wider tensor."""
    rows, outs = out.shape
    tiles = choose_matmul_tiles(rows, x.dtype, fixed=fixed, part=part)
    count, length = (
        split_k_count_and_length(part, tiles) if fixed or rows <= _MAX_SOME_ROWS else (1, part.words_per_output)
    )
    grid = cdiv(rows, tiles.block_m) * cdiv(outs, tiles.block_n)
    shape = (tiles.block_m, tiles.block_n, part.inputs_per_step, part.interleaved_outputs)
    compiled = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    inputs, added = (x, part.codes, *part.kernel_scales_and_offsets), part.factors if bias is None else bias
    if count > 1 and rows <= _MAX_SOME_ROWS:
        sums = torch.empty((count, rows, outs), dtype=torch.float32, device=x.device)
        kernels.multiply_split_k[grid, count](
            *inputs,
            sums,
            rows,
            outs,
            part.in_features,
            part.words_per_output,
            part.group_size,
            length,
            *part.kernel_form,
            *shape,
            **compiled,
        )
        kernels.reduce_split_k[rows, cdiv(outs, _COLUMN_BLOCK)](
            sums,
            part.factors,
            added,
            out,
            rows,
            outs,
            out.stride(0),
            count,
            bias is not None,
            _COLUMN_BLOCK,
            num_warps=4,
        )
        return
    kernels.multiply_weight_only[grid,](
        *inputs, part.factors, added, out, rows, outs, part.in_features, part.words_per_output, out.stride(0),
        part.group_size, length, count, *part.kernel_form, bias is not None, *shape, count > 1, **compiled,
    )  # fmt: skip


def _multiply_rounded_codes(
    part: PackedWeight, x: RoundedActivations, bias: Tensor | None, out: Tensor, fixed: bool
) -> None:
    rows, outs = out.shape
    tiles = choose_matmul_tiles(rows, x.codes.dtype, fixed=fixed)
    code_dtype = torch.float8_e4m3fn if part.kernel_form[0] == kernels.FLOATS else torch.int8
    kernels.multiply_block_scaled_codes[cdiv(rows, tiles.block_m) * cdiv(outs, tiles.block_n),](
        x.codes.view(code_dtype), x.scales, part.codes.view(code_dtype), part.kernel_scales_and_offsets[0],
        part.factors, part.factors if bias is None else bias, out, rows, outs, part.in_features, out.stride(0),
        part.group_size, part.scales is not None, bias is not None, tiles.block_m, tiles.block_n, SCALE_BLOCK,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def look_up_rows(part: PackedWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return dequantized rows [ids, inner]."""
    ids = ids.contiguous()
    out = torch.empty((len(ids), part.in_features), dtype=dtype, device=ids.device)
    if len(ids):
        kernels.look_up_embedding_rows[len(ids), cdiv(part.in_features, _COLUMN_BLOCK)](
            ids, part.codes, *part.kernel_scales_and_offsets, part.factors, out, part.out_features, part.in_features,
            part.words_per_output, part.group_size, *part.kernel_form, part.inputs_per_step, part.interleaved_outputs,
            _COLUMN_BLOCK, num_warps=4,
        )  # fmt: skip
    return out
