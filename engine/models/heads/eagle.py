"""EAGLE's heads (Li et al., 2024 and 2025): a layer or a few that read the decoder's hidden state at a place together
with the token that follows it, and say the hidden state, and so the token, that comes next. They attend to all places
before, so they have keys and values of their own. Chains only: the likeliest guess each time, no tree of several.

EAGLE-3 reads three layers of the decoder, where EAGLE reads the last hidden state, and has its own, smaller vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.engine.errors import ModelError
from quire.engine.layers.attention import Attention, AttentionSpec, PageTensor
from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.mlp import Mlp, MlpSpec
from quire.engine.layers.norm import NormWeights
from quire.engine.layers.parameters import Parameter, ParameterTable
from quire.engine.layers.rope import rope_table
from quire.engine.layers.schemes import Scheme
from quire.engine.models.decoder import Decoder
from quire.engine.models.heads.head import DraftHead
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, Backend, Pages, Softmax
from quire.kernels.kv_codes import UNSCALED

_UNSAID = -1e30
"""The logit of a token that the head cannot say."""


@dataclass(frozen=True, slots=True)
class EagleSpec:
    """The shape of the layers, and how the hidden states come in."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: dict[str, Any]
    """See rope_table."""
    qkv_bias: bool
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


class _Layers:
    """The layers, of which the first gets its input normed, if it is to be."""

    def __init__(self, spec: EagleSpec, scheme: Scheme, decoder: Decoder, backend: Backend) -> None:
        dtype, size = decoder.dtype, spec.hidden_size
        cos_sin = rope_table(spec.rope, spec.head_dim, decoder.max_model_len).to(decoder.device)
        common = AttentionSpec(
            hidden_size=size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            softmax=Softmax(spec.head_dim**-0.5),
            norm_eps=spec.norm_eps,
            norm_offset=0.0,
            qkv_bias=spec.qkv_bias,
            out_bias=False,
            qk_norm=False,
            output_norm=False,
        )
        first = replace(common, input_size=2 * size if spec.taps else size, input_norm=False)
        mlp = MlpSpec(size, spec.intermediate_size, spec.norm_eps, 0.0, bias=False, gelu=False, output_norm=False)
        self._attention = [
            Attention(
                each,
                backend,
                scheme,
                layer=f"layers.{index}",
                cos_sin=cos_sin,
                dtype=dtype,
                kv_dtype=decoder.kv_dtype,
                kv_scales=UNSCALED,
            )
            for index, each in enumerate([first, *[common] * (spec.num_layers - 1)])
        ]
        self._mlp = [
            Mlp(mlp, backend, scheme, layer=f"layers.{index}", dtype=dtype) for index in range(spec.num_layers)
        ]

    def parameters(self) -> ParameterTable:
        table: ParameterTable = {}
        for attention, mlp in zip(self._attention, self._mlp, strict=True):
            table |= attention.parameters() | mlp.parameters()
        return table

    def pages(self, num_blocks: int) -> list[tuple[PageTensor, ...]]:
        return [each.pages(num_blocks) for each in self._attention]

    @property
    def page_formula(self) -> str:
        return f"{self._attention[0].page_formula} x {len(self._attention)} layers"

    def forward(
        self, x: Tensor, residual: Tensor, metadata: AttentionMetadata, kv_cache: Sequence[Pages]
    ) -> tuple[Tensor, Tensor]:
        """Returns (output, residual stream), not yet added."""
        metadata = replace(metadata, linear=NO_ADAPTERS)  # adapters are the decoder's
        for index, (attention, mlp) in enumerate(zip(self._attention, self._mlp, strict=True)):
            attend = attention.forward if index else attention.attend
            x, residual = attend(x, residual, metadata, kv_cache[index], None)
            x, residual = mlp.forward(x, residual, NO_ADAPTERS)
        return x, residual


class Eagle(DraftHead):
    """The first EAGLE. Its first layer has no norm before attention, and nothing is normed at the end."""

    def __init__(self, spec: EagleSpec, scheme: Scheme, decoder: Decoder, backend: Backend) -> None:
        """It takes embedding and head of the decoder."""
        self.device = decoder.device
        self._decoder = decoder
        self._fc = JoinedLinear(scheme, 2 * spec.hidden_size, {"fc": spec.hidden_size}, bias=spec.fc_bias)
        self._layers = _Layers(spec, scheme, decoder, backend)
        self.page_formula = self._layers.page_formula

    def parameters(self) -> ParameterTable:
        return self._fc.parameters() | self._layers.parameters()

    def pages(self, num_blocks: int) -> list[tuple[PageTensor, ...]]:
        return self._layers.pages(num_blocks)

    def observe(
        self,
        following: Tensor,
        hidden: Tensor,
        tapped: Sequence[Tensor],
        metadata: AttentionMetadata | None,
        kv_cache: Sequence[Pages],
    ) -> Tensor:
        assert metadata is not None
        return self.advance(following, hidden, metadata, kv_cache)

    def advance(
        self, following: Tensor, states: Tensor, metadata: AttentionMetadata, kv_cache: Sequence[Pages]
    ) -> Tensor:
        read = torch.cat((self._decoder.embed(following), states), dim=-1)
        x = self._fc.packed(read, NO_ADAPTERS)
        x, residual = self._layers.forward(x, x.clone(), metadata, kv_cache)
        return x + residual

    def logits(self, states: Tensor, guessed: int) -> Tensor:
        return self._decoder.logits(states)


class Eagle3(DraftHead):
    def __init__(self, spec: EagleSpec, scheme: Scheme, decoder: Decoder, backend: Backend) -> None:
        """It takes the embedding of the decoder."""
        assert spec.draft_vocab_size is not None
        self.taps = spec.taps
        self._spec = spec
        self.device = decoder.device
        self._decoder = decoder
        self._backend = backend
        size, read = spec.hidden_size, len(spec.taps) * decoder.spec.hidden_size
        self._fc = JoinedLinear(scheme, read, {"fc": size}, bias=spec.fc_bias)
        self._layers = _Layers(spec, scheme, decoder, backend)
        self.page_formula = self._layers.page_formula
        names = ("layers.0.input_layernorm", "layers.0.hidden_norm", "norm")
        self._norms = NormWeights(dict.fromkeys(names, size), decoder.dtype, offset=0.0)
        self._head = JoinedLinear(scheme, size, {"lm_head": spec.draft_vocab_size}, bias=False, wide=True)
        self._tokens: Tensor | None = None
        """[draft vocabulary] int64: the decoder's ids of what it can say; None: the same."""

    def parameters(self) -> ParameterTable:
        table = self._fc.parameters() | self._layers.parameters() | self._norms.parameters() | self._head.parameters()
        if self._spec.maps_tokens:
            table["d2t"] = Parameter((self._spec.draft_vocab_size or 0,), torch.int64, self._put_offsets)
        return table

    def pages(self, num_blocks: int) -> list[tuple[PageTensor, ...]]:
        return self._layers.pages(num_blocks)

    def observe(
        self,
        following: Tensor,
        hidden: Tensor,
        tapped: Sequence[Tensor],
        metadata: AttentionMetadata | None,
        kv_cache: Sequence[Pages],
    ) -> Tensor:
        assert metadata is not None
        read = self._fc.packed(torch.cat(tuple(tapped), dim=-1), NO_ADAPTERS)
        return self.advance(following, read, metadata, kv_cache)

    def advance(
        self, following: Tensor, states: Tensor, metadata: AttentionMetadata, kv_cache: Sequence[Pages]
    ) -> Tensor:
        eps, rms_norm, norms = self._spec.norm_eps, self._backend.rms_norm, self._norms
        embedded = rms_norm(self._decoder.embed(following), norms["layers.0.input_layernorm"], eps)
        normed = rms_norm(states, norms["layers.0.hidden_norm"], eps)
        residual = (normed if self._spec.norm_before_residual else states).clone()  # a backend may overwrite it
        x = torch.cat((embedded, normed), dim=-1)
        x, residual = self._layers.forward(x, residual, metadata, kv_cache)
        return x + residual

    def logits(self, states: Tensor, guessed: int) -> Tensor:
        normed = self._backend.rms_norm(states, self._norms["norm"], self._spec.norm_eps)
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
