from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata, Linear, LinearContext


class ReferencePerHeadLinear:
    """The last `passthrough_dim` elements of each head's input are appended unchanged to its outputs."""

    def __init__(self, linears: Sequence[Linear], passthrough_dim: int) -> None:
        self._linears, self._passthrough_dim = linears, passthrough_dim

    def __call__(self, x: Tensor, context: LinearContext) -> Tensor:
        outputs = []
        for linear, block in zip(self._linears, x.chunk(len(self._linears), dim=-1), strict=True):
            inputs, passed = block.split((block.shape[1] - self._passthrough_dim, self._passthrough_dim), dim=-1)
            outputs += [linear(inputs.contiguous(), context), passed]
        return torch.cat(outputs, dim=-1)


@runtime_checkable
class ExpandablePerHeadLinear(Protocol):
    """Linears that absorb queries into latent space. Their backend may instead expand a prompt's latents into keys and
    values.
    """

    def should_expand(self, cache: Tensor, metadata: AttentionMetadata) -> bool:
        """True if expanding is faster for these tokens, whose keys must all be in the cache."""

    def attend_expanded(
        self, q: Tensor, expand: Linear, cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        """Return [T, H * V] for rotated, unabsorbed queries [T, H, P + R]. `expand` has the linears from latent space
        to values. The cache [P, page size, 1, L + R] must hold all latents of these tokens.
        """


def as_worthwhile_expandable_or_none(
    blocks: Linear, cache: Tensor, metadata: AttentionMetadata
) -> ExpandablePerHeadLinear | None:
    return blocks if isinstance(blocks, ExpandablePerHeadLinear) and blocks.should_expand(cache, metadata) else None
