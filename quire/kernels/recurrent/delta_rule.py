"""The gated delta rule (Yang et al., 2024) as in Qwen's models, and Kimi's (Moonshot AI, 2025: Kimi Linear).

Each value head of a sequence has a matrix S [key, value]. q and k of its key head are normalized to length 1, and q is
divided by sqrt(key). With decay = exp(rate * softplus(a + dt_bias)) and beta = sigmoid(b):

    S = decay * S;  S = S + k (beta * (v - k S))^T;  result = q S

Kimi's decay has an element per row of S, Qwen's is one number. S and the arithmetic are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.recurrent.recurrence import Recurrence, to_compute_dtype

L2_NORM_EPS = 1e-6
"""Added to the squared lengths of q and k."""


@dataclass(frozen=True, slots=True)
class DeltaRule(Recurrence):
    decay_rate: Tensor
    """[heads] float32, below 0."""
    dt_bias: Tensor
    """[heads] or, for a decay per row, [heads * key] float32."""
    norm_weight: Tensor
    """[value] float32."""
    eps: float
    num_key_heads: int
    """Each key head serves the same number of consecutive value heads."""
    key_dim: int
    has_sigmoid_gate: bool = False

    @property
    def num_heads(self) -> int:
        return len(self.decay_rate)

    @property
    def value_dim(self) -> int:
        return len(self.norm_weight)

    @property
    def has_row_decay(self) -> bool:
        return len(self.dt_bias) != self.num_heads

    @property
    def input_dim(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def head_inputs_dim(self) -> int:
        return self.num_heads + len(self.dt_bias)

    def advance_and_read_state(self, numbers: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, decay, beta = self._split_inputs(to_compute_dtype(numbers))
        matrices = matrices * decay[:, :, None]
        delta = beta[:, None] * (v - (matrices * k[:, :, None]).sum(1))
        matrices = matrices + k[:, :, None] * delta[:, None]
        return matrices, (matrices * q[:, :, None]).sum(1)

    def _split_inputs(self, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return q and k [heads, key], v [heads, value], decay [heads, key or 1] and beta [heads]."""
        keys, dtype = self.num_key_heads * self.key_dim, numbers.dtype
        sizes = [keys, keys, self.num_heads * self.value_dim, self.num_heads, len(self.dt_bias)]
        q, k, v, b, a = numbers.split(sizes)
        group = self.num_heads // self.num_key_heads
        q, k = (each.view(self.num_key_heads, self.key_dim) for each in (q, k))
        q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + L2_NORM_EPS) for each in (q, k))
        q, k = (each.repeat_interleave(group, dim=0) for each in (q * self.key_dim**-0.5, k))
        step = F.softplus(a + self.dt_bias.to(dtype)).view(self.num_heads, -1)
        decay = torch.exp(self.decay_rate.to(dtype)[:, None] * step)
        return q, k, v.view(self.num_heads, self.value_dim), decay, b.sigmoid()

    def gate_readout(self, read: Tensor, z: Tensor) -> Tensor:
        factor = torch.rsqrt(read.pow(2).mean(-1, keepdim=True) + self.eps)
        wide_z = z.to(read.dtype).view(read.shape)
        gate = wide_z.sigmoid() if self.has_sigmoid_gate else F.silu(wide_z)
        return (read * factor * self.norm_weight.to(read.dtype) * gate).flatten().to(z.dtype)
