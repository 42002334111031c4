"""Rounding of activations to 8 bits. A trial checks that rounding inside norms and gates gives the same bits as
rounding afterwards.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quire.kernels.device.error_messages import describe_kernel_error
from quire.kernels.gpu import triton_fused
from quire.kernels.gpu.quantization import triton_rounded as kernels
from quire.kernels.gpu.quantization.weight_packing import SCALE_BLOCK
from quire.kernels.gpu.triton_launch_sizes import cdiv
from quire.kernels.quantized_tensors import ActivationRounding, RoundedActivations

log = logging.getLogger("quire.kernels")

_BLOCKS_PER_PROGRAM = 8
"""A block has SCALE_BLOCK inputs."""
_ROW_BLOCK = 4096
_GATE_BLOCK = 2048
_TRIAL_SHAPE = (17, 4096)


@dataclass(frozen=True, slots=True)
class EightBitRounding(ActivationRounding):
    is_integer: bool
    """If False, x is rounded to float8."""
    has_block_scales: bool
    """If True, a row has one scale per SCALE_BLOCK inputs, [blocks, rows]; otherwise one, [rows]."""
    pair_distance: int
    """0 if codes are stored in natural order. Otherwise they are interleaved like 8-bit weights in 16-bit words, and
    this is the number of inputs per step (see `PackedWeight`).
    """

    def round_rows(self, x: Tensor) -> RoundedActivations:
        """x is [rows, in]."""
        x = x.contiguous()
        rows, inner = x.shape
        rounded = self._allocate_rounded(x, inner, whole=None)
        if self.has_block_scales and rows:
            kernels.round_per_block[rows, cdiv(len(rounded.scales), _BLOCKS_PER_PROGRAM)](
                x,
                rounded.codes,
                rounded.scales,
                rows,
                inner,
                self._kernel_format_code,
                self.pair_distance,
                SCALE_BLOCK,
                _BLOCKS_PER_PROGRAM,
                num_warps=4,
            )
        elif rows:
            kernels.round_per_row[rows,](
                x,
                rounded.codes,
                rounded.scales,
                inner,
                self._kernel_format_code,
                self.pair_distance,
                _ROW_BLOCK,
                num_warps=8,
            )
        return rounded

    def norm_and_round(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, *, whole: bool
    ) -> tuple[RoundedActivations, Tensor]:
        x = x.contiguous()
        total = x if residual is None else residual.contiguous()
        rows, size = x.shape
        out = (torch.empty_like(x) if residual is None else x) if whole else None
        rounded = self._allocate_rounded(x, size, out)
        row, warps = triton_fused.row_block_size_and_warps(size)
        if rows:
            kernels.norm_rounded[rows,](
                x if out is None else out, rounded.codes, rounded.scales, x, total, weight,
                weight if bias is None else bias, eps, rows, size, row, residual is not None, bias is not None, whole,
                self._kernel_format_code, self.pair_distance, SCALE_BLOCK, self.has_block_scales, num_warps=warps,
            )  # fmt: skip
        return rounded, total

    def gate_and_round(self, gate_up: Tensor, *, gelu: bool, whole: bool) -> RoundedActivations:
        gate_up = gate_up.contiguous()
        rows, size = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, size)) if whole else None
        rounded = self._allocate_rounded(gate_up, size, out)
        kernel_tensors = (gate_up if out is None else out, rounded.codes, rounded.scales, gate_up)
        if self.has_block_scales and rows:
            kernels.gate_rounded[rows, cdiv(len(rounded.scales), _BLOCKS_PER_PROGRAM)](
                *kernel_tensors,
                rows,
                size,
                gelu,
                whole,
                self._kernel_format_code,
                self.pair_distance,
                SCALE_BLOCK,
                _BLOCKS_PER_PROGRAM,
                num_warps=4,
            )
        elif rows:
            kernels.gate_rounded_per_row[rows,](
                *kernel_tensors,
                size,
                gelu,
                whole,
                self._kernel_format_code,
                self.pair_distance,
                _GATE_BLOCK,
                num_warps=8,
            )
        return rounded

    @property
    def _kernel_format_code(self) -> int:
        return 0 if self.is_integer else 1

    def _allocate_rounded(self, like: Tensor, size: int, whole: Tensor | None) -> RoundedActivations:
        rows = len(like)
        codes = torch.empty((rows, size), dtype=torch.int8 if self.is_integer else torch.uint8, device=like.device)
        shape = (cdiv(size, SCALE_BLOCK), rows) if self.has_block_scales else (rows,)
        scales = torch.empty(shape, dtype=torch.float32, device=like.device)
        return RoundedActivations(codes, scales, self, like.dtype, whole)


def can_fuse(form: EightBitRounding, inner: int, dtype: torch.dtype, device: torch.device) -> bool:
    if inner < SCALE_BLOCK:
        return False
    return device.type != "cuda" or trial_failure_reason(form, dtype, device) is None


@cache
def trial_failure_reason(
    form: EightBitRounding, dtype: torch.dtype, device: torch.device, shape: tuple[int, int] = _TRIAL_SHAPE
) -> str | None:
    try:
        reason = "other bits" if _differs_from_unfused(form, dtype, device, shape) else None
    except Exception as error:  # falls back to unfused rounding
        reason = describe_kernel_error(error)
    if reason is not None:
        log.warning("norms and gates do not round to 8 bits (%s): %s", form, reason)
    return reason


def _differs_from_unfused(
    form: EightBitRounding, dtype: torch.dtype, device: torch.device, shape: tuple[int, int]
) -> bool:
    generator, (rows, size) = torch.Generator().manual_seed(0), shape
    x, residual = torch.randn((2, rows, size), generator=generator).to(device, dtype)
    weight, bias = torch.randn((2, size), generator=generator).to(device)
    gate_up = torch.randn((rows, 2 * size), generator=generator).to(device, dtype)
    pairs = [(form.gate_and_round(gate_up, gelu=False, whole=False), form.round_rows(triton_fused.silu_mul(gate_up)))]
    for each in (None, bias):
        fused, total = form.norm_and_round(x.clone(), residual.clone(), weight, each, 1e-6, whole=False)
        wanted, summed = triton_fused.add_layer_norm(x.clone(), residual.clone(), weight, each, 1e-6)
        if not torch.equal(total, summed):
            return True
        pairs.append((fused, form.round_rows(wanted)))
    return any(
        not (torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)) for one, other in pairs
    )
