"""Medusa's heads (Cai et al., 2024): each guesses the token of one more place from the same hidden state. Chains only:
each head's likeliest guess, no tree of several."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch.nn.functional as F
from torch import Tensor

from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.parameters import ParameterTable, parameters_of
from quire.engine.layers.schemes import Scheme
from quire.engine.models.decoder import Decoder
from quire.engine.models.heads.head import DraftHead
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, Pages


class Medusa(DraftHead):
    def __init__(self, scheme: Scheme, decoder: Decoder, heads: int, blocks: int) -> None:
        """`blocks`: linears of a head before its last one."""
        hidden_size, vocab_size = decoder.spec.hidden_size, decoder.spec.vocab_size
        self.device = decoder.device
        self.most = heads
        self._blocks = [
            [
                JoinedLinear(scheme, hidden_size, {f"{head}.{block}.linear": hidden_size}, bias=True)
                for block in range(blocks)
            ]
            for head in range(heads)
        ]
        self._last = [
            JoinedLinear(scheme, hidden_size, {f"{head}.{blocks}": vocab_size}, bias=False, wide=True)
            for head in range(heads)
        ]

    def parameters(self) -> ParameterTable:
        return parameters_of(*chain.from_iterable(self._blocks), *self._last)

    def observe(
        self,
        following: Tensor,
        hidden: Tensor,
        tapped: Sequence[Tensor],
        metadata: AttentionMetadata | None,
        kv_cache: Sequence[Pages],
    ) -> Tensor:
        return hidden

    def advance(
        self, following: Tensor, states: Tensor, metadata: AttentionMetadata, kv_cache: Sequence[Pages]
    ) -> Tensor:
        return states

    def logits(self, states: Tensor, guessed: int) -> Tensor:
        x = states
        for block in self._blocks[guessed]:
            x = x + F.silu(block.packed(x, NO_ADAPTERS))
        return self._last[guessed].packed(x, NO_ADAPTERS)
