"""Linears of which each has inputs and outputs of its own, in plain PyTorch: the judge of linear_blocks.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata, Linear, LinearContext
from quire.kernels.softmax import Softmax


class ReferenceBlocks:
    """`Backend.pack_blocks`, block by block: each has its own inputs, and the `passed` numbers behind these follow its
    outputs as they are."""

    def __init__(self, linears: Sequence[Linear], passed: int) -> None:
        self._linears, self._passed = linears, passed

    def __call__(self, x: Tensor, context: LinearContext) -> Tensor:
        found = []
        for linear, block in zip(self._linears, x.chunk(len(self._linears), dim=-1), strict=True):
            inputs, passed = block.split((block.shape[1] - self._passed, self._passed), dim=-1)
            found += [linear(inputs.contiguous(), context), passed]
        return torch.cat(found, dim=-1)


@runtime_checkable
class ExpandableBlocks(Protocol):
    """Linears of single heads that bring queries into the space of latents, of a backend that need not do so: keys and
    values of all heads can be made of a prompt's latents."""

    def expands(self, cache: Tensor, metadata: AttentionMetadata) -> bool:
        """Whether that is to be done with the latents of these tokens, which are all their keys."""

    def attend(self, q: Tensor, expand: Linear, cache: Tensor, metadata: AttentionMetadata, softmax: Softmax) -> Tensor:
        """What attention gives, [T, H * V], for turned queries that were not brought there, [T, H, P + R]. expand: the
        linears that bring values out of it. cache [P, page size, 1, L + R] has all latents of these tokens."""


def expandable(blocks: Linear, cache: Tensor, metadata: AttentionMetadata) -> ExpandableBlocks | None:
    """Those that `Backend.pack_blocks` made, if latents of these tokens are to be expanded."""
    return blocks if isinstance(blocks, ExpandableBlocks) and blocks.expands(cache, metadata) else None
