"""EAGLE heads (Li et al., 2024 and 2025): layers with KV cache predict the next hidden state from the last one and the
next token. EAGLE-3 reads three decoder layers and has a smaller vocabulary. No draft trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quire.engine.architecture.decoder import LayerSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.common.errors import ModelError
from quire.engine.layers.linear import FusedLinear
from quire.engine.layers.norm import NormWeights
from quire.engine.layers.parameters import LoadableParameter, ParameterTable
from quire.engine.layers.schemes import QuantizationScheme
from quire.engine.models.decoder import Decoder
from quire.engine.models.heads.transformer_head import TransformerHead
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, Backend, LayerCache

_IMPOSSIBLE_LOGIT = -1e30
"""For tokens outside the draft vocabulary."""


@dataclass(frozen=True, slots=True)
class EagleSpec:
    layers: tuple[LayerSpec, ...]
    """The first layer's input is normed already."""
    hidden_size: int
    norm: NormSpec
    fc_bias: bool
    aux_layers: tuple[int, ...] = ()
    """EAGLE-3 only."""
    norm_before_residual: bool = False
    """EAGLE-3 only."""
    draft_vocab_size: int | None = None
    """None: the decoder's head is used."""
    has_token_map: bool = False
    """Draft ids differ from the decoder's."""


class EagleHead(TransformerHead):
    """No norm before the first attention or at the end."""

    def __init__(self, spec: EagleSpec, scheme: QuantizationScheme, decoder: Decoder, backend: Backend) -> None:
        layers = {f"layers.{index}": layer for index, layer in enumerate(spec.layers)}
        super().__init__(layers, scheme, decoder, backend)
        self._spec, self.aux_layers = spec, spec.aux_layers
        size, input_size = spec.hidden_size, len(spec.aux_layers) * decoder.spec.hidden_size or 2 * spec.hidden_size
        self._fc = FusedLinear(scheme, input_size, {"fc": size}, bias=spec.fc_bias)

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
        assert spec.draft_vocab_size is not None
        names, size = ("layers.0.input_layernorm", "layers.0.hidden_norm", "norm"), spec.hidden_size
        self._norms = NormWeights(dict.fromkeys(names, size), decoder.dtype, spec.norm)
        self._head = FusedLinear(scheme, size, {"lm_head": spec.draft_vocab_size}, bias=False, wide=True)
        self._token_ids: Tensor | None = None
        """[draft vocabulary] int64 decoder ids; None: the same ids."""

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
        embedded = norm("layers.0.input_layernorm", self._decoder.embed_tokens_unscaled(next_tokens))
        normed = norm("layers.0.hidden_norm", states)
        residual = (normed if self._spec.norm_before_residual else states).clone()  # a backend may overwrite it
        x, residual = self._run_layers(torch.cat((embedded, normed), dim=-1), residual, metadata, kv_cache)
        return x + residual

    def compute_logits(self, states: Tensor, num_drafted: int) -> Tensor:
        normed = self._norms.apply_norm(self._backend, "norm", states)
        draft_logits = self._head.packed_linear(normed, NO_ADAPTERS)
        if self._token_ids is None:
            return draft_logits
        # Finite: a request may allow no draft token, but something must be sampled.
        logits = draft_logits.new_full((len(draft_logits), self._decoder.spec.vocab_size), _IMPOSSIBLE_LOGIT)
        return logits.index_copy_(1, self._token_ids, draft_logits)

    def _load_token_offsets(self, offsets: Tensor) -> None:
        """d2t holds decoder id minus draft id."""
        tokens = offsets + torch.arange(len(offsets), device=offsets.device)
        vocab = self._decoder.spec.vocab_size
        if not bool(((tokens >= 0) & (tokens < vocab)).all()):
            raise ModelError(f"model: d2t: has a token that is none of the served model's {vocab}")
        self._token_ids = tokens
