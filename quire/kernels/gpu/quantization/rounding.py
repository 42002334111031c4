"""How products of few bits take x in 8 bits (`Eights`), by the kernels of triton_rounded.py; and a trial that what
norms and gates give in 8 bits is what is rounded afterwards, bit for bit."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quire.kernels.gpu import triton_fused
from quire.kernels.gpu.faults import fault
from quire.kernels.gpu.quantization import triton_rounded as kernels
from quire.kernels.gpu.quantization.packing import BLOCK
from quire.kernels.gpu.triton_sizes import cdiv
from quire.kernels.quantized import Rounded, Rounding

log = logging.getLogger("quire.kernels")

_AT_ONCE = 8
"""Blocks of BLOCK inputs in one program."""
_ROW_BLOCK = 4096
"""Inputs of a row that a program reads at once to round it,"""
_GATE_BLOCK = 2048
"""and of a gate's."""
_TRIED = (17, 4096)
"""Rows and inputs."""


@dataclass(frozen=True, slots=True)
class Eights(Rounding):
    integers: bool
    """Else they are 8-bit floats."""
    by_blocks: bool
    """A scale for each BLOCK inputs of a row, [blocks, rows]; else one for each row, [rows]."""
    paired: int
    """Codes have the order that those of the weights have, in words of two: inputs of a step; 0: their own."""

    def of(self, x: Tensor) -> Rounded:
        """x [rows, in], rounded by itself."""
        x = x.contiguous()
        rows, inner = x.shape
        made = self._empty(x, inner, whole=None)
        if self.by_blocks and rows:
            kernels.round_rows[rows, cdiv(len(made.scales), _AT_ONCE)](
                x, made.codes, made.scales, rows, inner, self._kind, self.paired, BLOCK, _AT_ONCE, num_warps=4
            )
        elif rows:
            kernels.round_whole_rows[rows,](
                x, made.codes, made.scales, inner, self._kind, self.paired, _ROW_BLOCK, num_warps=8
            )
        return made

    def norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, *, whole: bool
    ) -> tuple[Rounded, Tensor]:
        x = x.contiguous()
        total = x if residual is None else residual.contiguous()
        rows, size = x.shape
        out = (torch.empty_like(x) if residual is None else x) if whole else None
        made = self._empty(x, size, out)
        row, warps = triton_fused.of_row(size)
        if rows:
            kernels.norm_rounded[rows,](
                x if out is None else out, made.codes, made.scales, x, total, weight, weight if bias is None else bias,
                eps, rows, size, row, residual is not None, bias is not None, whole, self._kind, self.paired, BLOCK,
                self.by_blocks, num_warps=warps,
            )  # fmt: skip
        return made, total

    def gate(self, gate_up: Tensor, *, gelu: bool, whole: bool) -> Rounded:
        gate_up = gate_up.contiguous()
        rows, size = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, size)) if whole else None
        made = self._empty(gate_up, size, out)
        given = (gate_up if out is None else out, made.codes, made.scales, gate_up)
        if self.by_blocks and rows:
            kernels.gate_rounded[rows, cdiv(len(made.scales), _AT_ONCE)](
                *given, rows, size, gelu, whole, self._kind, self.paired, BLOCK, _AT_ONCE, num_warps=4
            )
        elif rows:
            kernels.gate_rounded_whole[rows,](
                *given, size, gelu, whole, self._kind, self.paired, _GATE_BLOCK, num_warps=8
            )
        return made

    @property
    def _kind(self) -> int:
        return 0 if self.integers else 1

    def _empty(self, like: Tensor, size: int, whole: Tensor | None) -> Rounded:
        rows = len(like)
        codes = torch.empty((rows, size), dtype=torch.int8 if self.integers else torch.uint8, device=like.device)
        shape = (cdiv(size, BLOCK), rows) if self.by_blocks else (rows,)
        scales = torch.empty(shape, dtype=torch.float32, device=like.device)
        return Rounded(codes, scales, self, like.dtype, whole)


def fuses(form: Eights, inner: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether norms and gates give x of this type in the form. Narrow rows fill no block, as a norm holds them."""
    if inner < BLOCK:
        return False
    return device.type != "cuda" or why_not(form, dtype, device) is None


@cache
def why_not(form: Eights, dtype: torch.dtype, device: torch.device, shape: tuple[int, int] = _TRIED) -> str | None:
    """Why they do not on this GPU, in one sentence, which the log gets; None: the bits are the same. shape: rows and
    inputs that are tried."""
    try:
        reason = "other bits" if _differs(form, dtype, device, shape) else None
    except Exception as error:  # whatever it says, x is rounded by itself
        reason = fault(error)
    if reason is not None:
        log.warning("norms and gates do not round to 8 bits (%s): %s", form, reason)
    return reason


def _differs(form: Eights, dtype: torch.dtype, device: torch.device, shape: tuple[int, int]) -> bool:
    generator, (rows, size) = torch.Generator().manual_seed(0), shape
    x, residual = torch.randn((2, rows, size), generator=generator).to(device, dtype)
    weight, bias = torch.randn((2, size), generator=generator).to(device)
    gate_up = torch.randn((rows, 2 * size), generator=generator).to(device, dtype)
    pairs = [(form.gate(gate_up, gelu=False, whole=False), form.of(triton_fused.silu_mul(gate_up)))]
    for each in (None, bias):
        found, total = form.norm(x.clone(), residual.clone(), weight, each, 1e-6, whole=False)
        wanted, summed = triton_fused.add_layer_norm(x.clone(), residual.clone(), weight, each, 1e-6)
        if not torch.equal(total, summed):
            return True
        pairs.append((found, form.of(wanted)))
    return any(
        not (torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)) for one, other in pairs
    )
