"""Medusa heads (Cai et al., 2024). Draft trees are not supported."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch.nn.functional as F
from torch import Tensor

from quire.engine.architecture.draft_heads import MedusaSpec
from quire.engine.layers.parameters import ParameterTable, merge_parameters
from quire.engine.layers.schemes import QuantizationScheme
from quire.engine.layers.sublayer_shapes import SublayerShapes
from quire.engine.models.decoder import Decoder
from quire.engine.models.heads.draft_head import DraftHead, draft_build_context
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, Backend, LayerCache


class MedusaHead(DraftHead):
    def __init__(self, spec: MedusaSpec, scheme: QuantizationScheme, decoder: Decoder, backend: Backend) -> None:
        self.device = decoder.device
        self.max_draft_tokens = spec.num_heads
        shapes = SublayerShapes(spec.parameter_shapes(), draft_build_context(scheme, decoder, backend))
        heads = range(spec.num_heads)
        self._blocks = [[shapes.make_linear([name]) for name in spec.block_names(head)] for head in heads]
        self._last = [shapes.make_linear([spec.last_name(head)], wide=True) for head in heads]

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
