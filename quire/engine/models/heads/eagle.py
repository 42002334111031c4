"""EAGLE heads (Li et al., 2024 and 2025). EAGLE-3 reads three decoder layers and has a smaller vocabulary. Draft trees
are not supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from quire.engine.architecture.draft_heads import EAGLE3_HEAD, EAGLE3_NORMS, EAGLE_FC, EagleSpec
from quire.engine.common.errors import ModelError
from quire.engine.layers.parameters import LoadableParameter, ParameterTable
from quire.engine.layers.schemes import QuantizationScheme
from quire.engine.models.decoder import Decoder
from quire.engine.models.heads.transformer_head import TransformerHead
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, Backend, LayerCache

_IMPOSSIBLE_LOGIT = -1e30


class EagleHead(TransformerHead):
    """A head without norms before the first attention and at the end. Uses the decoder's embedding and LM head."""

    def __init__(self, spec: EagleSpec, scheme: QuantizationScheme, decoder: Decoder, backend: Backend) -> None:
        super().__init__(spec, scheme, decoder, backend)
        self._spec, self.aux_layers = spec, spec.aux_layers
        self._fc = self._outer_shapes.make_linear([EAGLE_FC])

    def parameters(self) -> ParameterTable:
        return self._fc.parameters() | super().parameters()

    def advance_states(
        self, next_tokens: Tensor, states: Tensor, metadata: AttentionMetadata, kv_cache: Sequence[LayerCache]
    ) -> Tensor:
        joined = torch.cat((self._decoder.embed_tokens_unscaled(next_tokens), states), dim=-1)
        x = self._fc.packed_linear(joined, NO_ADAPTERS)
        x, residual = self._run_layers(x, x.clone(), metadata, kv_cache)
        return x + residual


class Eagle3Head(EagleHead):
    def __init__(self, spec: EagleSpec, scheme: QuantizationScheme, decoder: Decoder, backend: Backend) -> None:
        super().__init__(spec, scheme, decoder, backend)
        self._norms = self._outer_shapes.make_norms(EAGLE3_NORMS, spec.norm)
        self._head = self._outer_shapes.make_linear([EAGLE3_HEAD], wide=True)
        self._token_ids: Tensor | None = None
        """[draft vocabulary] int64: the decoder's token ids; None if both vocabularies are the same."""

    def parameters(self) -> ParameterTable:
        table = super().parameters() | self._norms.parameters() | self._head.parameters()
        if self._spec.has_token_map:
            table["d2t"] = LoadableParameter((self._spec.draft_vocab_size or 0,), torch.int64, self._load_token_offsets)
        return table

    def initial_states(self, hidden: Tensor, aux_hidden_states: Sequence[Tensor]) -> Tensor:
        return self._fc.packed_linear(torch.cat(tuple(aux_hidden_states), dim=-1), NO_ADAPTERS)

    def advance_states(
        self, next_tokens: Tensor, states: Tensor, metadata: AttentionMetadata, kv_cache: Sequence[LayerCache]
    ) -> Tensor:
        norm = partial(self._norms.apply_norm, self._backend)
        embedding_norm, state_norm, _ = EAGLE3_NORMS
        embedded = norm(embedding_norm, self._decoder.embed_tokens_unscaled(next_tokens))
        normed = norm(state_norm, states)
        residual = (normed if self._spec.norm_before_residual else states).clone()  # a backend may overwrite residual
        x, residual = self._run_layers(torch.cat((embedded, normed), dim=-1), residual, metadata, kv_cache)
        return x + residual

    def compute_logits(self, states: Tensor, num_drafted: int) -> Tensor:
        normed = self._norms.apply_norm(self._backend, EAGLE3_NORMS[-1], states)
        draft_logits = self._head.packed_linear(normed, NO_ADAPTERS)
        if self._token_ids is None:
            return draft_logits
        # Other tokens have a finite logit. A request may allow no token of the draft vocabulary, but something must be
        # sampled.
        logits = draft_logits.new_full((len(draft_logits), self._decoder.spec.vocab_size), _IMPOSSIBLE_LOGIT)
        return logits.index_copy_(1, self._token_ids, draft_logits)

    def _load_token_offsets(self, offsets: Tensor) -> None:
        """d2t holds decoder id minus draft id."""
        tokens = offsets + torch.arange(len(offsets), device=offsets.device)
        vocab = self._decoder.spec.vocab_size
        if not bool(((tokens >= 0) & (tokens < vocab)).all()):
            raise ModelError(f"model: d2t: has a token outside the served model's {vocab}")
        self._token_ids = tokens
