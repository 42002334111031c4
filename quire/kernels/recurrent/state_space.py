"""Selective state spaces as Mamba 2 has them (Dao and Gu, 2024), with what stands behind them, in plain PyTorch: the
judge of the compiled kernels.

Each head of a sequence has a matrix S [key, value]. A token gives x [value] of the head, b and c [key] of a group of
heads, and a number dt of the head. With step = softplus(dt + shift), held between two limits:

    S = exp(rate * step) * S + b (step * x)^T;  y = c S + skip * x

y is rounded to the type of what is given, multiplied with SiLU of the token's gate z, and normed: an RMSNorm over the
heads of a group, before the gate, behind it, or none. S and the arithmetic are float32. How tokens follow one another,
and what becomes of guesses: recurrence.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.recurrent.recurrence import Recurrence, wide


@dataclass(frozen=True, slots=True)
class StateSpace(Recurrence):
    rate: Tensor
    """[heads] float32, below 0,"""
    shift: Tensor
    """of the same shape,"""
    skip: Tensor
    """and the same again: as above."""
    norm: Tensor | None
    """[heads * value] float32, the norm's weight; None: there is no norm."""
    eps: float
    """What it adds to the mean of squares."""
    groups: int
    """Of as many heads each, which stand side by side."""
    key: int
    """Numbers of b and of c."""
    value: int
    """Numbers of a head's x."""
    limits: tuple[float, float] = (0.0, float("inf"))
    """Of steps."""
    norm_first: bool = False
    """The norm stands before the gate."""

    @property
    def heads(self) -> int:
        return len(self.rate)

    @property
    def inputs(self) -> int:
        """Numbers of a token's x, b and c."""
        return self.heads * self.value + 2 * self.groups * self.key

    @property
    def beside(self) -> int:
        """Of dt."""
        return self.heads

    def advance(self, numbers: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
        given = wide(numbers)
        keys = self.groups * self.key
        x, b, c, dt = given.split([self.heads * self.value, keys, keys, self.heads])
        b, c = (each.view(self.groups, self.key).repeat_interleave(self.heads // self.groups, 0) for each in (b, c))
        x, rate, shift, skip = (
            x.view(self.heads, self.value),
            *(each.to(given.dtype) for each in (self.rate, self.shift, self.skip)),
        )
        step = F.softplus(dt + shift).clamp(*self.limits)
        matrices = matrices * torch.exp(rate * step)[:, None, None] + b[:, :, None] * (step[:, None] * x)[:, None]
        return matrices, (matrices * c[:, :, None]).sum(1) + skip[:, None] * x

    def result(self, read: Tensor, z: Tensor) -> Tensor:
        gate, y = F.silu(wide(z)), read.flatten()
        if self.norm is None:
            return (y * gate).to(z.dtype)
        y = wide((y if self.norm_first else y * gate).to(z.dtype)).view(self.groups, -1)
        factor = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        normed = (y * factor).flatten() * self.norm.to(y.dtype)
        return (normed * gate if self.norm_first else normed).to(z.dtype)
