"""Fits scales and offsets of 4-bit weight groups. Tries round-to-nearest and smaller steps, which clip the group's
extremes. Fits scale and offset to the codes of each try by least squares, and takes the best try, rounded to half
floats. For checkpoints, which need integer zero points, also tries the zero points next to the nearest one, with
bfloat16 scales.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

GROUP_SIZE = 32
_RANGE_FACTORS = tuple(1 - 0.03 * step for step in range(11))
"""Fractions of a group's range that the 15 steps between codes cover."""
_GROUPS_PER_BATCH, _GPU_GROUPS_PER_BATCH = 1 << 9, 1 << 18
"""Groups per batch: few enough to stay in a CPU's caches and not to start PyTorch's threads, and many enough to keep
other devices busy.
"""
_MIN_SCALE = 2.0**-100


def fit_int4(groups: Tensor, *, zero_points: bool) -> tuple[Tensor, Tensor, Tensor]:
    codes = torch.empty(groups.shape, dtype=torch.uint8, device=groups.device)
    scales, offsets = (torch.empty(len(groups), device=groups.device) for _ in range(2))
    size = _GROUPS_PER_BATCH if groups.device.type == "cpu" else _GPU_GROUPS_PER_BATCH

    @torch.inference_mode()  # per thread
    def fit_piece(begin: int) -> None:
        piece = slice(begin, begin + size)
        fitted = (_fit_with_zero_points if zero_points else _fit_with_offsets)(groups[piece].float())
        codes[piece], scales[piece], offsets[piece] = fitted

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(fit_piece, range(0, len(groups), size)))
    return codes[:, ::2] | codes[:, 1::2] << 4, scales, offsets


def _fit_with_offsets(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [n, 32] from 0 to 15, scales and offsets [n]."""
    low, high = groups.aminmax(dim=1, keepdim=True)
    tiny = torch.finfo(torch.float32).tiny
    middle, least = groups.mean(1, keepdim=True), torch.full_like(low, torch.inf)
    scale, offset = torch.zeros_like(low), low
    for factor in _RANGE_FACTORS:
        tried = (high - low) * (factor / 15)
        start = low + (high - low) * ((1 - factor) / 2) + 8 * tried
        steps = _nearest_signed_codes(groups, tried, start)
        centred = steps - steps.mean(1, keepdim=True)
        square = centred.square().sum(1, keepdim=True)
        fitted = _round_mantissa((centred * groups).sum(1, keepdim=True) / square.clamp_min(tiny), 11)
        fitted_offset = _round_mantissa(middle - fitted * steps.mean(1, keepdim=True), 11)
        error = (
            (_nearest_signed_codes(groups, fitted, fitted_offset) * fitted + fitted_offset - groups)
            .square()
            .sum(1, keepdim=True)
        )
        better = error < least
        scale, offset = torch.where(better, fitted, scale), torch.where(better, fitted_offset, offset)
        least = torch.where(better, error, least)
    codes = (_nearest_signed_codes(groups, scale, offset) + 8).to(torch.uint8)
    return codes, scale.squeeze(1), offset.squeeze(1)


def _fit_with_zero_points(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [n, 32] from 0 to 15, scales and zero points [n]."""
    low, high = groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True).clamp(min=0)
    least = torch.full_like(low, torch.inf)
    scale = torch.ones_like(low)
    zero = torch.zeros_like(low)
    for factor in _RANGE_FACTORS:
        step = _round_mantissa((high - low) * (factor / 15), 8).clamp_min(_MIN_SCALE)
        nearest = (-(low + (high - low) * ((1 - factor) / 2)) / step).round()
        for more in (-1, 0, 1):
            tried = (nearest + more).clamp(0, 15)
            steps = _nearest_codes(groups, step, tried) - tried
            square = steps.square().sum(1, keepdim=True)
            fitted = _round_mantissa((steps * groups).sum(1, keepdim=True) / square.clamp_min(_MIN_SCALE), 8).clamp_min(
                _MIN_SCALE
            )
            error = ((_nearest_codes(groups, fitted, tried) - tried) * fitted - groups).square().sum(1, keepdim=True)
            better = error < least
            scale, zero = torch.where(better, fitted, scale), torch.where(better, tried, zero)
            least = torch.where(better, error, least)
    return _nearest_codes(groups, scale, zero).to(torch.uint8), scale.squeeze(1), zero.squeeze(1)


def _round_mantissa(numbers: Tensor, bits: int) -> Tensor:
    """Round numbers to `bits` significant bits: 11 for half floats, 8 for bfloat16."""
    mantissas, exponents = torch.frexp(numbers)
    return torch.ldexp((mantissas * 2**bits).round_(), exponents - bits)


def _nearest_signed_codes(groups: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, (groups - offset) / scale).round_().clamp_(-8, 7)


def _nearest_codes(groups: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return ((groups / scale).round_() + zero).clamp_(0, 15)
