"""What `Backend.fuse_layers` takes: a decoder's layers by what they compute with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from quire.kernels.backend import AttentionMetadata, Linear, Mixture, Pages, Rope, Softmax


@dataclass(frozen=True, slots=True)
class DenseAttention:
    """Grouped-query attention with its norms, as engine/layers/attention.py computes it. Norms are [hidden] float32."""

    input_norm: Tensor
    qkv: Linear
    rope: Rope
    softmax: Softmax
    out: Linear
    output_norm: Tensor | None
    """Norm of what attention gives, before it joins the residual stream."""
    group: int = 0
    """Whose block table it reads: see AttentionMetadata.of."""
    place: int = 0
    """Which of the pages it is given are its own."""


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """A gated MLP with its norms, as engine/layers/mlp.py computes it."""

    input_norm: Tensor
    gate_up: Linear
    gelu: bool
    """The gate is GELU in its tanh approximation, not SiLU."""
    down: Linear
    output_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """A mixture of experts with its norm, as engine/layers/moe.py computes it."""

    input_norm: Tensor
    experts: Mixture


DecoderLayer = tuple[DenseAttention, DenseMlp | SparseMlp]
FusedLayers = Callable[[Tensor, Tensor | None, AttentionMetadata, Sequence[Pages], range], tuple[Tensor, Tensor]]
"""Called with (x, residual, metadata, pages by place, range of layers to run). x [T, hidden] is the output of the
previous MLP, not yet added to the stream `residual` (None: x is the embeddings). Returns the same two after the last of
the layers. Overwrites both arguments."""
