"""Mamba's selective scans (Gu and Dao, 2023).

Each channel of a sequence has a state S [key]. A token gives x and dt per channel, and b and c [key] for all channels,
which some families normalize first (RMSNorm). With step = softplus(dt + dt_bias):

    S = exp(rate * step) * S + b (step * x);  y = c S + skip * x

S and the arithmetic are float32. A fixed number of channels is a head with one matrix [key, value]; threads and ranks
divide heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.recurrent.recurrence import Recurrence, to_compute_dtype


@dataclass(frozen=True, slots=True)
class SelectiveScan(Recurrence):
    decay_rate: Tensor
    """[heads, key, value] float32, below 0."""
    dt_bias: Tensor
    """[heads * value] float32."""
    skip: Tensor
    """[heads * value] float32."""
    b_norm: Tensor | None
    """[key] float32. Both norms are None if b and c are not normalized."""
    c_norm: Tensor | None
    """[key] float32."""
    eps: float

    @property
    def num_heads(self) -> int:
        return self.decay_rate.shape[0]

    @property
    def key_dim(self) -> int:
        return self.decay_rate.shape[1]

    @property
    def value_dim(self) -> int:
        return self.decay_rate.shape[2]

    @property
    def input_dim(self) -> int:
        return self.num_heads * self.value_dim + 2 * self.key_dim

    @property
    def head_inputs_dim(self) -> int:
        return self.num_heads * self.value_dim

    def advance_and_read_state(self, numbers: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
        wide_inputs, channels = to_compute_dtype(numbers), self.num_heads * self.value_dim
        x, b, c, dt = wide_inputs.split([channels, self.key_dim, self.key_dim, channels])
        b, c = self._rms_norm(b, self.b_norm), self._rms_norm(c, self.c_norm)
        rate, shift, skip = (each.to(wide_inputs.dtype) for each in (self.decay_rate, self.dt_bias, self.skip))
        step = F.softplus(dt + shift).view(self.num_heads, 1, self.value_dim)
        matrices = matrices * torch.exp(rate * step) + b[:, None] * (step * x.view(step.shape))
        return matrices, (matrices * c[:, None]).sum(1) + (skip * x).view(self.num_heads, self.value_dim)

    def _rms_norm(self, numbers: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return numbers
        return numbers * torch.rsqrt(numbers.pow(2).mean() + self.eps) * weight.to(numbers.dtype)

    def gate_readout(self, read: Tensor, z: Tensor) -> Tensor:
        return (read.flatten() * F.silu(to_compute_dtype(z))).to(z.dtype)
