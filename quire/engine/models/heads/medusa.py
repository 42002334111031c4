"""Medusa heads (Cai et al., 2024): each predicts one position from the same hidden state. No draft trees."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch.nn.functional as F
from torch import Tensor

from quire.engine.layers.linear import FusedLinear
from quire.engine.layers.parameters import ParameterTable, merge_parameters
from quire.engine.layers.schemes import QuantizationScheme
from quire.engine.models.decoder import Decoder
from quire.engine.models.heads.draft_head import DraftHead
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, LayerCache


class MedusaHead(DraftHead):
    def __init__(self, scheme: QuantizationScheme, decoder: Decoder, heads: int, blocks: int) -> None:
        """`blocks`: linears before a head's last one."""
        hidden_size, vocab_size = decoder.spec.hidden_size, decoder.spec.vocab_size
        self.device = decoder.device
        self.max_draft_tokens = heads
        self._blocks = [
            [
                FusedLinear(scheme, hidden_size, {f"{head}.{block}.linear": hidden_size}, bias=True)
                for block in range(blocks)
            ]
            for head in range(heads)
        ]
        self._last = [
            FusedLinear(scheme, hidden_size, {f"{head}.{blocks}": vocab_size}, bias=False, wide=True)
            for head in range(heads)
        ]

    def parameters(self) -> ParameterTable:
        return merge_parameters(*chain.from_iterable(self._blocks), *self._last)

    def compute_states(
        self,
        next_tokens: Tensor,
        hidden: Tensor,
        aux_hidden_states: Sequence[Tensor],
        metadata: AttentionMetadata | None,
        kv_cache: Sequence[LayerCache],
    ) -> Tensor:
        return hidden

    def advance_states(
        self, next_tokens: Tensor, states: Tensor, metadata: AttentionMetadata, kv_cache: Sequence[LayerCache]
    ) -> Tensor:
        return states

    def compute_logits(self, states: Tensor, num_drafted: int) -> Tensor:
        x = states
        for block in self._blocks[num_drafted]:
            x = x + F.silu(block.packed_linear(x, NO_ADAPTERS))
        return self._last[num_drafted].packed_linear(x, NO_ADAPTERS)
