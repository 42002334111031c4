"""Interface of draft heads. A head keeps a state per position, computed from the model's hidden states. From it, it
predicts the token after next, and continues with its own predictions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.engine.layers.parameters import ParameterTable
from quire.engine.layers.sublayer import CacheTensorSpec
from quire.kernels.backend import AttentionMetadata, LayerCache


class DraftHead(ABC):
    """Hidden states and states are [T, hidden]."""

    device: torch.device
    aux_layers: tuple[int, ...] = ()
    """Decoder layers that it reads inputs of, ascending, in addition to the last hidden states."""
    max_draft_tokens: int | None = None
    """None: unlimited."""
    block_bytes_formula: str = "0"

    @property
    def reads_all_tokens(self) -> bool:
        """True if it reads the hidden states of all tokens, not just of those before a sampled one."""
        return bool(self.block_tensor_specs(1))

    def block_tensor_specs(self, num_blocks: int) -> list[tuple[CacheTensorSpec, ...]]:
        """Per layer."""
        return []

    @abstractmethod
    def parameters(self) -> ParameterTable:
        """By checkpoint name."""

    @abstractmethod
    def compute_states(
        self,
        next_tokens: Tensor,
        hidden: Tensor,
        aux_hidden_states: Sequence[Tensor],
        metadata: AttentionMetadata | None,
        kv_cache: Sequence[LayerCache],
    ) -> Tensor:
        """States at T tokens. `metadata`: the decoder's; None unless `reads_all_tokens`."""

    @abstractmethod
    def advance_states(
        self, next_tokens: Tensor, states: Tensor, metadata: AttentionMetadata, kv_cache: Sequence[LayerCache]
    ) -> Tensor:
        """States at the draft tokens `next_tokens` [T], from the states before them."""

    @abstractmethod
    def compute_logits(self, states: Tensor, num_drafted: int) -> Tensor:
        """[T, vocab] float32 of the token after next, after `num_drafted` draft tokens."""
