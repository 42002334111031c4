"""EAGLE's heads (Li et al., 2024 and 2025): a layer or a few that read the decoder's hidden state at a place together
with the token that follows it, and say the hidden state, and so the token, that comes next. They attend to all places
before, so they have keys and values of their own. Chains only: the likeliest guess each time, no tree of several.

EAGLE-3 reads three layers of the decoder, where EAGLE reads the last hidden state, and has its own, smaller vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quire.engine.errors import ModelError
from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.norm import NormSpec, NormWeights
from quire.engine.layers.parameters import Parameter, ParameterTable
from quire.engine.layers.schemes import Scheme
from quire.engine.models.decoder import Decoder
from quire.engine.models.heads.layers import LayersHead
from quire.engine.models.spec import LayerSpec
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, Backend, Pages

_UNSAID = -1e30
"""The logit of a token that the head cannot say."""


@dataclass(frozen=True, slots=True)
class EagleSpec:
    """Its layers, and how the hidden states come in."""

    layers: tuple[LayerSpec, ...]
    """What goes into the first of them is normed already, if it is to be."""
    hidden_size: int
    norm: NormSpec
    fc_bias: bool
    """Of the linear that makes one hidden state of what is read."""
    taps: tuple[int, ...] = ()
    """EAGLE-3's: the layers of the decoder whose inputs are read."""
    norm_before_residual: bool = False
    """EAGLE-3's: the hidden state is normed before it begins the residual stream."""
    draft_vocab_size: int | None = None
    """Tokens that EAGLE-3's own head can say; None: the decoder's head says them, as in EAGLE."""
    maps_tokens: bool = False
    """Whether the tokens that it can say have other ids than the decoder's."""


class Eagle(LayersHead):
    """The first EAGLE. Its first layer has no norm before attention, and nothing is normed at the end."""

    def __init__(self, spec: EagleSpec, scheme: Scheme, decoder: Decoder, backend: Backend) -> None:
        """It takes embedding and head of the decoder."""
        layers = {f"layers.{index}": layer for index, layer in enumerate(spec.layers)}
        super().__init__(layers, scheme, decoder, backend)
        self._spec, self.taps = spec, spec.taps
        size, read = spec.hidden_size, len(spec.taps) * decoder.spec.hidden_size or 2 * spec.hidden_size
        self._fc = JoinedLinear(scheme, read, {"fc": size}, bias=spec.fc_bias)

    def parameters(self) -> ParameterTable:
        return self._fc.parameters() | super().parameters()

    def advance(
        self, following: Tensor, states: Tensor, metadata: AttentionMetadata, kv_cache: Sequence[Pages]
    ) -> Tensor:
        read = torch.cat((self._decoder.embed(following), states), dim=-1)
        x = self._fc.packed(read, NO_ADAPTERS)
        x, residual = self._run(x, x.clone(), metadata, kv_cache)
        return x + residual


class Eagle3(Eagle):
    def __init__(self, spec: EagleSpec, scheme: Scheme, decoder: Decoder, backend: Backend) -> None:
        """It takes the embedding of the decoder."""
        super().__init__(spec, scheme, decoder, backend)
        assert spec.draft_vocab_size is not None
        names, size = ("layers.0.input_layernorm", "layers.0.hidden_norm", "norm"), spec.hidden_size
        self._norms = NormWeights(dict.fromkeys(names, size), decoder.dtype, spec.norm)
        self._head = JoinedLinear(scheme, size, {"lm_head": spec.draft_vocab_size}, bias=False, wide=True)
        self._tokens: Tensor | None = None
        """[draft vocabulary] int64: the decoder's ids of what it can say; None: the same."""

    def parameters(self) -> ParameterTable:
        table = super().parameters() | self._norms.parameters() | self._head.parameters()
        if self._spec.maps_tokens:
            table["d2t"] = Parameter((self._spec.draft_vocab_size or 0,), torch.int64, self._put_offsets)
        return table

    def states_of(self, hidden: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        return self._fc.packed(torch.cat(tuple(tapped), dim=-1), NO_ADAPTERS)

    def advance(
        self, following: Tensor, states: Tensor, metadata: AttentionMetadata, kv_cache: Sequence[Pages]
    ) -> Tensor:
        norm = partial(self._norms.norm, self._backend)
        embedded = norm("layers.0.input_layernorm", self._decoder.embed(following))
        normed = norm("layers.0.hidden_norm", states)
        residual = (normed if self._spec.norm_before_residual else states).clone()  # a backend may overwrite it
        x, residual = self._run(torch.cat((embedded, normed), dim=-1), residual, metadata, kv_cache)
        return x + residual

    def logits(self, states: Tensor, guessed: int) -> Tensor:
        normed = self._norms.norm(self._backend, "norm", states)
        own = self._head.packed(normed, NO_ADAPTERS)
        if self._tokens is None:
            return own
        # A request may allow none of them, and then something must be drawn all the same.
        logits = own.new_full((len(own), self._decoder.spec.vocab_size), _UNSAID)
        return logits.index_copy_(1, self._tokens, own)

    def _put_offsets(self, offsets: Tensor) -> None:
        """Of each id from the decoder's."""
        tokens = offsets + torch.arange(len(offsets), device=offsets.device)
        vocab = self._decoder.spec.vocab_size
        if not bool(((tokens >= 0) & (tokens < vocab)).all()):
            raise ModelError(f"model: d2t: has a token that is none of the served model's {vocab}")
        self._tokens = tokens
