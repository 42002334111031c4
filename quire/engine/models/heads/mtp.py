"""Multi-token prediction layers (DeepSeek-V3, 2024; Qwen, GLM). Let h be the model's normed last hidden state at a
position, and t the following token. The layers compute

    s = norm(layer(W [norm(embedding of t); norm(h)])),

from which the model's LM head predicts the token after t. For further tokens, s replaces h. Nemotron 3 has two layers,
attention and experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.engine.architecture.draft_heads import EH_PROJ, EMBEDDING_NORM, HIDDEN_NORM, OUTPUT_NORM, MTPSpec
from quire.engine.layers.parameters import ParameterTable
from quire.engine.layers.schemes import QuantizationScheme
from quire.engine.models.decoder import Decoder
from quire.engine.models.heads.transformer_head import TransformerHead
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, Backend, LayerCache


class MTPHead(TransformerHead):
    def __init__(self, spec: MTPSpec, scheme: QuantizationScheme, decoder: Decoder, backend: Backend) -> None:
        super().__init__(spec, scheme, decoder, backend)
        self._norms = self._outer_shapes.make_norms((EMBEDDING_NORM, HIDDEN_NORM, OUTPUT_NORM), spec.norm)
        self._eh_proj = self._outer_shapes.make_linear([EH_PROJ])

    def parameters(self) -> ParameterTable:
        return self._norms.parameters() | self._eh_proj.parameters() | super().parameters()

    def advance_states(
        self, next_tokens: Tensor, states: Tensor, metadata: AttentionMetadata, kv_cache: Sequence[LayerCache]
    ) -> Tensor:
        embedded = self._norms.apply_norm(
            self._backend, EMBEDDING_NORM, self._decoder.embed_tokens_unscaled(next_tokens)
        )
        normed_states = self._norms.apply_norm(self._backend, HIDDEN_NORM, states)
        x = self._eh_proj.packed_linear(torch.cat((embedded, normed_states), dim=-1), NO_ADAPTERS)
        x, residual = self._run_layers(x, None, metadata, kv_cache)
        return self._norms.add_and_norm(self._backend, OUTPUT_NORM, x, residual)[0]
