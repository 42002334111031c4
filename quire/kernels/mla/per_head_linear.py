"""Linears of which each has inputs and outputs of its own, in plain PyTorch: the judge of linear_blocks.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata, Linear, LinearContext


class ReferencePerHeadLinear:
    """`Backend.pack_per_head_linear`, block by block: each has its own inputs, and the `passed` numbers behind these
    follow its outputs as they are."""

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
    """Linears of single heads that bring queries into the space of latents, of a backend that need not do so: keys and
    values of all heads can be made of a prompt's latents."""

    def should_expand(self, cache: Tensor, metadata: AttentionMetadata) -> bool:
        """Whether that is to be done with the latents of these tokens, which are all their keys."""

    def attend_expanded(
        self, q: Tensor, expand: Linear, cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        """What attention gives, [T, H * V], for turned queries that were not brought there, [T, H, P + R]. expand: the
        linears that bring values out of it. cache [P, page size, 1, L + R] has all latents of these tokens."""


def as_worthwhile_expandable_or_none(
    blocks: Linear, cache: Tensor, metadata: AttentionMetadata
) -> ExpandablePerHeadLinear | None:
    """Those that `Backend.pack_per_head_linear` made, if latents of these tokens are to be expanded."""
    return blocks if isinstance(blocks, ExpandablePerHeadLinear) and blocks.should_expand(cache, metadata) else None
