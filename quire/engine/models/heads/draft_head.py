"""A draft head computes a state per position from the model's hidden states, and predicts the token after next."""

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
    """Returns a context with the decoder's sizes and dtypes, but without its sharding."""
    shape = (decoder.spec.hidden_size, decoder.dtype, decoder.kv_dtype, decoder.device, decoder.max_model_len)
    return BuildContext(backend, scheme, *shape, kv_scales={})


class DraftHead(ABC):
    """Hidden states and the head's own states are [T, hidden]."""

    device: torch.device
    aux_layers: tuple[int, ...] = ()
    """The head reads the inputs of these layers (ascending) and the last hidden states."""
    max_draft_tokens: int | None = None
    """None means unlimited."""
    block_bytes_formula: str = "0"

    @property
    def reads_all_tokens(self) -> bool:
        """If False, the head reads only tokens that are directly before a sampled token."""
        return bool(self.block_tensor_specs(1))

    def block_tensor_specs(self, num_blocks: int) -> list[tuple[CacheTensorSpec, ...]]:
        return []

    @abstractmethod
    def parameters(self) -> ParameterTable: ...

    @abstractmethod
    def compute_states(
        self,
        next_tokens: Tensor,
        hidden: Tensor,
        aux_hidden_states: Sequence[Tensor],
        metadata: AttentionMetadata | None,
        kv_cache: Sequence[LayerCache],
    ) -> Tensor:
        """`metadata` is None unless `reads_all_tokens`."""

    @abstractmethod
    def advance_states(
        self, next_tokens: Tensor, states: Tensor, metadata: AttentionMetadata, kv_cache: Sequence[LayerCache]
    ) -> Tensor:
        """Returns the states after `next_tokens` [T], which are the draft tokens that follow `states`."""

    @abstractmethod
    def compute_logits(self, states: Tensor, num_drafted: int) -> Tensor:
        """Returns [T, vocab] float32."""
