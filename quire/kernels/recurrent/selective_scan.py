"""Selective scans as Mamba has them (Gu and Dao, 2023), in plain PyTorch: the judge of the compiled kernels.

Each channel of a sequence has numbers S [key] of its own. A token gives x of the channel, a number dt of the channel,
and b and c [key] of all channels, which some families norm first (an RMSNorm). With step = softplus(dt + shift):

    S = exp(rate * step) * S + b (step * x);  y = c S + skip * x

y is multiplied with SiLU of the token's gate z. S and the arithmetic are float32. Here so many channels are a head,
whose numbers are one matrix [key, value]: heads are what threads and ranks divide. How tokens follow one another, and
what becomes of guesses: recurrence.py. State spaces as Mamba 2 has them, with one rate and one step for a whole head:
state_space.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.recurrent.recurrence import Recurrence, wide


@dataclass(frozen=True, slots=True)
class SelectiveScan(Recurrence):
    rate: Tensor
    """[heads, key, value] float32, below 0,"""
    shift: Tensor
    """[heads * value] float32,"""
    skip: Tensor
    """and of the same shape: as above."""
    write_norm: Tensor | None
    """[key] float32, the weight of b's norm,"""
    read_norm: Tensor | None
    """and of c's; None, both of them: there are no norms."""
    eps: float
    """What these add to the mean of squares."""

    @property
    def heads(self) -> int:
        return self.rate.shape[0]

    @property
    def key(self) -> int:
        return self.rate.shape[1]

    @property
    def value(self) -> int:
        return self.rate.shape[2]

    @property
    def inputs(self) -> int:
        """Numbers of a token's x, b and c."""
        return self.heads * self.value + 2 * self.key

    @property
    def beside(self) -> int:
        """Of dt."""
        return self.heads * self.value

    def advance(self, numbers: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
        given, channels = wide(numbers), self.heads * self.value
        x, b, c, dt = given.split([channels, self.key, self.key, channels])
        b, c = self._normed(b, self.write_norm), self._normed(c, self.read_norm)
        rate, shift, skip = (each.to(given.dtype) for each in (self.rate, self.shift, self.skip))
        step = F.softplus(dt + shift).view(self.heads, 1, self.value)
        matrices = matrices * torch.exp(rate * step) + b[:, None] * (step * x.view(step.shape))
        return matrices, (matrices * c[:, None]).sum(1) + (skip * x).view(self.heads, self.value)

    def _normed(self, numbers: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return numbers
        return numbers * torch.rsqrt(numbers.pow(2).mean() + self.eps) * weight.to(numbers.dtype)

    def result(self, read: Tensor, z: Tensor) -> Tensor:
        return (read.flatten() * F.silu(wide(z))).to(z.dtype)
