"""The kinds of what layers keep of sequences, with their numbers and bytes, and which layer keeps what. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.engine.checkpoint.families import DELTA_NETS, SELECTIVE_SCANS, STATE_SPACES, STATES, layer_parts

PIECE = 16
"""Tokens that are hashed together where pages are larger: behind each piece a cached prefix may end."""


@dataclass(frozen=True, slots=True)
class PagedState:
    """What a layer keeps of each token of a sequence, in pages."""

    numbers: int
    """Of a token."""
    window: int | None
    """Tokens that a token sees, itself included; None: all."""
    head: int = 0
    """Numbers of one key, where layers differ in them: their pages are then of another shape."""


@dataclass(frozen=True, slots=True)
class ColumnState:
    """What a layer keeps of a sequence as a whole: the columns of its last tokens, in the sequence's slot; and in pages
    those that stand at the end of every PIECE tokens, so that another sequence can begin there."""

    channels: int
    """Numbers of a column."""
    columns: int
    """That a token sees of those before it."""
    window: None = None

    @property
    def numbers(self) -> int:
        """In pages, for each token."""
        return -(-self.columns * self.channels // PIECE)

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
    numbers: int = 0
    """In pages, for each token."""

    def slot_bytes(self, drafts: int, width: int) -> int:
        """As ColumnState's; matrices are float32."""
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
    numbers: int = 0

    def slot_bytes(self, drafts: int, width: int) -> int:
        return 0


State = PagedState | ColumnState | MatrixState | SharedState
LayerStates = tuple[State, ...]
"""Of one layer's parts."""


def state_of(text: Mapping[str, Any], hidden: int) -> ColumnState | MatrixState | None:
    """What a convolution, a delta net, a state space or a selective scan keeps, in families that have some."""
    kind = str(text.get("model_type"))
    if kind in DELTA_NETS:
        key_heads, heads = int(text.get("linear_num_key_heads") or 16), int(text.get("linear_num_value_heads") or 32)
        key, value = int(text.get("linear_key_head_dim") or 128), int(text.get("linear_value_head_dim") or 128)
        columns = max(int(text.get("linear_conv_kernel_dim") or 4), 2) - 1
        return MatrixState(2 * key_heads * key + heads * value, columns, heads, key, value, 2 * heads)
    if kind in (*STATE_SPACES, *SELECTIVE_SCANS):
        names = ("mamba_n_heads", "mamba_d_state", "mamba_d_head", "mamba_n_groups", "mamba_d_conv")
        sizes = [int(size) if isinstance(size := text.get(name), int) else 1 for name in names]
        heads, key, value, groups, width = sizes
        if kind in SELECTIVE_SCANS:
            channels = heads * value
            return MatrixState(channels, max(width, 2) - 1, heads, key, value, channels + 2 * key)
        return MatrixState(heads * value + 2 * groups * key, max(width, 2) - 1, heads, key, value, heads)
    return ColumnState(hidden, max(int(text.get("conv_L_cache") or 3), 2) - 1) if kind in STATES else None


def in_layers(
    text: Mapping[str, Any],
    state: ColumnState | MatrixState | None,
    attention: Sequence[PagedState],
    layers: int,
) -> tuple[LayerStates, ...]:
    """What layers keep, in their order: this state, what those with attention keep, or both."""
    if state is None:
        return tuple((each,) for each in attention)
    rest, found = iter(attention), list[LayerStates]()
    for parts in layer_parts(text, layers):
        own = next(rest, None) if parts.attends else None
        found.append(((own,) if own is not None else ()) + ((state,) if parts.keeps else ()))
    return tuple(found)
