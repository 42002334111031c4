"""The kinds of what layers keep of sequences, with their numbers and bytes."""

from __future__ import annotations

from dataclasses import dataclass

PIECE = 16
"""Tokens that are hashed together where pages are larger: behind each piece a cached prefix may end."""


@dataclass(frozen=True, slots=True)
class PagedState:
    """What a layer keeps of each token of a sequence, in pages."""

    paged_values_per_token: int
    """Of a token."""
    window: int | None
    """Tokens that a token sees, itself included; None: all."""
    head: int = 0
    """Numbers of one key, where layers differ in them: their pages are then of another shape."""

    def bytes_per_token(self, kv_width: int, model_width: int, head_scale_bytes: int = 0) -> int:
        """In pages. kv_width: bytes of a number of keys and values; model_width: of the model's type; head_scale_bytes:
        what a head takes beside its numbers, where these are codes."""
        scales = self.paged_values_per_token // self.head * head_scale_bytes if head_scale_bytes else 0
        return self.paged_values_per_token * kv_width + scales


@dataclass(frozen=True, slots=True)
class PagedColumnState:
    """What a layer keeps of a sequence as a whole: the columns of its last tokens, in the sequence's slot; and in pages
    those that stand at the end of every PIECE tokens, so that another sequence can begin there."""

    channels: int
    """Numbers of a column."""
    columns: int
    """That a token sees of those before it."""
    window: None = None

    @property
    def paged_values_per_token(self) -> int:
        """In pages, for each token."""
        return -(-self.columns * self.channels // PIECE)

    def bytes_per_token(self, kv_width: int, model_width: int, head_scale_bytes: int = 0) -> int:
        """As PagedState's; columns are never in few bits."""
        return self.paged_values_per_token * model_width

    def slot_bytes(self, drafts: int, width: int) -> int:
        """In a slot, where a step computes up to so many drafts of a sequence: the columns that may be wrong lie beside
        those that are right. `width`: bytes of a number in the model's type."""
        return (self.columns + drafts) * self.channels * width


@dataclass(frozen=True, slots=True)
class MatrixState:
    """What a layer keeps of a sequence as a whole, all of it in the sequence's slot: the columns of its last tokens, a
    matrix for each head, and what these are to take in of guesses that turn out right. It is too large for every page:
    another sequence begins behind a page only where a snapshot of the slot was kept."""

    channels: int
    """Numbers of a column."""
    columns: int
    """That a token sees of those before it."""
    heads: int
    key: int
    value: int
    beside: int
    """Numbers of a guess that are kept beside its column."""
    window: None = None
    paged_values_per_token: int = 0
    """In pages, for each token."""

    def bytes_per_token(self, kv_width: int, model_width: int, head_scale_bytes: int = 0) -> int:
        return 0

    def slot_bytes(self, drafts: int, width: int) -> int:
        """As PagedColumnState's; matrices are float32."""
        guesses = drafts * (self.channels + self.beside)
        matrices = self.heads * self.key * self.value * 4
        return ((self.columns + drafts) * self.channels + guesses) * width + matrices


@dataclass(frozen=True, slots=True)
class SharedState:
    """A layer keeps nothing of its own: it reads what another one keeps in pages."""

    layer: int
    """The other one, which comes before it."""
    window: int | None
    """As PagedState's."""
    paged_values_per_token: int = 0

    def bytes_per_token(self, kv_width: int, model_width: int, head_scale_bytes: int = 0) -> int:
        return 0

    def slot_bytes(self, drafts: int, width: int) -> int:
        return 0


State = PagedState | PagedColumnState | MatrixState | SharedState
LayerStates = tuple[State, ...]
"""Of one layer's parts."""
