"""What guesses tokens from hidden states: the interface of all heads.

A head keeps a state for every place in a sequence, made of the served model's hidden states there; from the state of a
place it guesses the token after next, and goes on from its own guesses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.engine.layers.parameters import ParameterTable
from quire.engine.layers.schemes import QuantizationScheme
from quire.engine.layers.sublayer import BuildContext, CacheTensorSpec
from quire.engine.models.decoder import Decoder
from quire.kernels.backend import AttentionMetadata, Backend, LayerCache


def draft_build_context(scheme: QuantizationScheme, decoder: Decoder, backend: Backend) -> BuildContext:
    """A head reads and writes what the decoder's layers do, in its types, whole on every rank."""
    shape = (decoder.spec.hidden_size, decoder.dtype, decoder.kv_dtype, decoder.device, decoder.max_model_len)
    return BuildContext(backend, scheme, *shape, kv_scales={})


class DraftHead(ABC):
    """Fill it by way of `parameters()` before use. Shapes: T tokens, hidden states and states [T, hidden]."""

    device: torch.device
    aux_layers: tuple[int, ...] = ()
    """The layers of the decoder whose inputs it reads beside the last hidden states, ascending."""
    max_draft_tokens: int | None = None
    """Tokens that it can guess in a row; None: any number."""
    block_bytes_formula: str = "0"
    """The bytes of a page of all its layers, as a sum of products."""

    @property
    def reads_all_tokens(self) -> bool:
        """Whether it reads the hidden states of all tokens, and not only of those before picks."""
        return bool(self.block_tensor_specs(1))

    def block_tensor_specs(self, num_blocks: int) -> list[tuple[CacheTensorSpec, ...]]:
        """Per layer, the tensors that hold so many pages."""
        return []

    @abstractmethod
    def parameters(self) -> ParameterTable:
        """Every tensor it takes, by its name in the checkpoint."""

    @abstractmethod
    def compute_states(
        self,
        next_tokens: Tensor,
        hidden: Tensor,
        aux_hidden_states: Sequence[Tensor],
        metadata: AttentionMetadata | None,
        kv_cache: Sequence[LayerCache],
    ) -> Tensor:
        """The states at T tokens, each with the token that `follows` it, the decoder's last hidden state, and what
        `aux_layers` gave. `metadata` is the decoder's own; None where it does not read all tokens."""

    @abstractmethod
    def advance_states(
        self, next_tokens: Tensor, states: Tensor, metadata: AttentionMetadata, kv_cache: Sequence[LayerCache]
    ) -> Tensor:
        """The states one place further, where the guess `next_tokens` [T] stands, from those before it."""

    @abstractmethod
    def compute_logits(self, states: Tensor, num_drafted: int) -> Tensor:
        """[T, vocab] float32 of the token after next. `num_drafted`: how many tokens were guessed before it."""
