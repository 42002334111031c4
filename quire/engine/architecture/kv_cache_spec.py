from __future__ import annotations

from dataclasses import dataclass

PIECE = 16
"""Number of tokens per hash in larger blocks. A cached prefix may end after any such piece."""


@dataclass(frozen=True, slots=True)
class PagedState:
    """Keys and values per token, in KV blocks."""

    paged_values_per_token: int
    window: int | None
    """Tokens that a token sees, itself included; None for all."""
    head: int = 0
    """Elements of one head's key; 0 only if keys and values are never quantized."""

    def bytes_per_token(self, kv_width: int, model_width: int, head_scale_bytes: int = 0) -> int:
        """`kv_width` is bytes per element of keys and values, `model_width` of the model's dtype. Each quantized head
        has `head_scale_bytes` of scales.
        """
        scales = self.paged_values_per_token // self.head * head_scale_bytes if head_scale_bytes else 0
        return self.paged_values_per_token * kv_width + scales


@dataclass(frozen=True, slots=True)
class PagedColumnState:
    """A sequence's slot holds a convolution's last columns. KV blocks hold the columns at the end of every PIECE
    tokens, so that other sequences can continue there.
    """

    channels: int
    columns: int
    """Number of earlier tokens that the convolution reads for a token."""
    window: None = None

    @property
    def paged_values_per_token(self) -> int:
        return -(-self.columns * self.channels // PIECE)

    def bytes_per_token(self, kv_width: int, model_width: int, head_scale_bytes: int = 0) -> int:
        """As in PagedState, but columns are never quantized."""
        return self.paged_values_per_token * model_width

    def slot_bytes(self, drafts: int, width: int) -> int:
        """Return a slot's bytes. Draft tokens have their own columns, because they may be rejected. `width` is bytes
        per element.
        """
        return (self.columns + drafts) * self.channels * width


@dataclass(frozen=True, slots=True)
class MatrixState:
    """A sequence's slot holds a convolution's last columns, a matrix per head, and the inputs of draft tokens until
    they are accepted. This state is too large for KV blocks, so a cached prefix needs a snapshot.
    """

    channels: int
    columns: int
    heads: int
    key: int
    value: int
    beside: int
    """Elements stored for a draft token in addition to its column."""
    window: None = None
    paged_values_per_token: int = 0

    def bytes_per_token(self, kv_width: int, model_width: int, head_scale_bytes: int = 0) -> int:
        return 0

    def slot_bytes(self, drafts: int, width: int) -> int:
        """Return a slot's bytes. Matrices are float32. `width` is bytes per other element."""
        guesses = drafts * (self.channels + self.beside)
        matrices = self.heads * self.key * self.value * 4
        return ((self.columns + drafts) * self.channels + guesses) * width + matrices


@dataclass(frozen=True, slots=True)
class SharedState:
    layer: int
    window: int | None
    paged_values_per_token: int = 0

    def bytes_per_token(self, kv_width: int, model_width: int, head_scale_bytes: int = 0) -> int:
        return 0

    def slot_bytes(self, drafts: int, width: int) -> int:
        return 0


State = PagedState | PagedColumnState | MatrixState | SharedState
LayerStates = tuple[State, ...]
