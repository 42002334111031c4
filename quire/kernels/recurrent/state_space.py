"""Mamba 2's selective state spaces (Dao and Gu, 2024).

Each head has a state matrix S [key, value] for each sequence. Each token provides x [value] and a number dt for each
head, and b [key] and c [key] for each group of heads. `rate` is decay_rate; step = softplus(dt + dt_bias), clamped to
dt_limits:

    S = exp(rate * step) * S + b (step * x)^T;  y = c S + skip * x

The output y is gated by silu(z). If there is an RMSNorm (over the heads of a group), its input is first rounded to the
dtype of z. S is float32. The arithmetic is float32, or float64 for float64 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.recurrent.recurrence import Recurrence, to_compute_dtype


@dataclass(frozen=True, slots=True)
class StateSpace(Recurrence):
    decay_rate: Tensor
    """[heads] float32, below 0."""
    dt_bias: Tensor
    """[heads] float32."""
    skip: Tensor
    """[heads] float32."""
    norm_weight: Tensor | None
    """[heads * value] float32. None: no norm."""
    eps: float
    num_groups: int
    """Each group has the same number of consecutive heads."""
    key_dim: int
    value_dim: int
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    norm_before_gate: bool = False

    @property
    def num_heads(self) -> int:
        return len(self.decay_rate)

    @property
    def input_dim(self) -> int:
        return self.num_heads * self.value_dim + 2 * self.num_groups * self.key_dim

    @property
    def head_inputs_dim(self) -> int:
        return self.num_heads

    def advance_and_read_state(self, numbers: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
        wide_inputs = to_compute_dtype(numbers)
        keys = self.num_groups * self.key_dim
        x, b, c, dt = wide_inputs.split([self.num_heads * self.value_dim, keys, keys, self.num_heads])
        b, c = (
            each.view(self.num_groups, self.key_dim).repeat_interleave(self.num_heads // self.num_groups, 0)
            for each in (b, c)
        )
        x, rate, shift, skip = (
            x.view(self.num_heads, self.value_dim),
            *(each.to(wide_inputs.dtype) for each in (self.decay_rate, self.dt_bias, self.skip)),
        )
        step = F.softplus(dt + shift).clamp(*self.dt_limits)
        matrices = matrices * torch.exp(rate * step)[:, None, None] + b[:, :, None] * (step[:, None] * x)[:, None]
        return matrices, (matrices * c[:, :, None]).sum(1) + skip[:, None] * x

    def gate_readout(self, read: Tensor, z: Tensor) -> Tensor:
        gate, y = F.silu(to_compute_dtype(z)), read.flatten()
        if self.norm_weight is None:
            return (y * gate).to(z.dtype)
        y = to_compute_dtype((y if self.norm_before_gate else y * gate).to(z.dtype)).view(self.num_groups, -1)
        factor = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        normed = (y * factor).flatten() * self.norm_weight.to(y.dtype)
        return (normed * gate if self.norm_before_gate else normed).to(z.dtype)
