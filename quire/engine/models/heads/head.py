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
from quire.engine.layers.part import PageTensor
from quire.kernels.backend import AttentionMetadata, Pages


class DraftHead(ABC):
    """Fill it by way of `parameters()` before use. Shapes: T tokens, hidden states and states [T, hidden]."""

    device: torch.device
    taps: tuple[int, ...] = ()
    """The layers of the decoder whose inputs it reads beside the last hidden states, ascending."""
    most: int | None = None
    """Tokens that it can guess in a row; None: any number."""
    page_formula: str = "0"
    """The bytes of a page of all its layers, as a sum of products."""

    @property
    def reads_all(self) -> bool:
        """Whether it reads the hidden states of all tokens, and not only of those before picks."""
        return bool(self.pages(1))

    def pages(self, num_blocks: int) -> list[tuple[PageTensor, ...]]:
        """Per layer, the tensors that hold so many pages."""
        return []

    @abstractmethod
    def parameters(self) -> ParameterTable:
        """Every tensor it takes, by its name in the checkpoint."""

    @abstractmethod
    def observe(
        self,
        following: Tensor,
        hidden: Tensor,
        tapped: Sequence[Tensor],
        metadata: AttentionMetadata | None,
        kv_cache: Sequence[Pages],
    ) -> Tensor:
        """The states at T tokens, each with the token that `follows` it, the decoder's last hidden state, and what
        `taps` gave. `metadata` is the decoder's own; None where it does not read all tokens."""

    @abstractmethod
    def advance(
        self, following: Tensor, states: Tensor, metadata: AttentionMetadata, kv_cache: Sequence[Pages]
    ) -> Tensor:
        """The states one place further, where the guess `following` [T] stands, from those before it."""

    @abstractmethod
    def logits(self, states: Tensor, guessed: int) -> Tensor:
        """[T, vocab] float32 of the token after next. `guessed`: how many tokens were guessed before it."""
