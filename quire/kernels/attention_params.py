"""What attention's weights follow from, beside queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.kernels.kv_quantization import UNIT_KV_SCALES, KVScales


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How a query weighs the keys of its sequence."""

    scale: float
    """Factor of the scores."""
    window: int | None = None
    """Keys that a query sees, itself included; None: all."""
    softcap: float | None = None
    """c replaces a score s by c * tanh(s / c)."""
    lookahead: int | None = 0
    """Keys behind its own position that a query sees; None: all. Backends of GPUs compute that by torch's
    scaled_dot_product_attention (kernels/gpu/images/bidirectional_attention.py), and what lies between as the reference
    does."""
    relative_bias: Tensor | None = None
    """[H, 2 L + 15] float32, for contexts of up to L tokens: added to the score of a key that stands d tokens behind
    the query (before it: d < 0) is column L - 1 + d. The last 16 columns are never used."""
    kv_scales: KVScales = UNIT_KV_SCALES
    """Of pages that hold 8-bit floats."""
    sinks: Tensor | None = None
    """[H] float32: a score of each head that takes its part of the weights and has no value (gpt-oss, 2025); of
    backends that can (`Backend.unsupported_attention_reason`)."""
    value_dim: int | None = None
    """A key's first numbers that are its value, where the values' cache is that of keys; of
    backends that can (`Backend.unsupported_attention_reason`)."""
    has_chunked_window: bool = False
    """The window does not move with the query: it begins at the last multiple of its size (Llama 4, 2025); of backends
    that can (`Backend.unsupported_attention_reason`)."""

    def first_visible_key(self, position: Any) -> Any:
        """The first key that a query at a position sees, which may be below 0; of a tensor of positions, likewise."""
        assert self.window is not None
        return position // self.window * self.window if self.has_chunked_window else position - self.window + 1

    @property
    def window_or_negative_chunk(self) -> int:
        """As kernels/cpu/attention_tile.h has it: 0: there is none; below 0: chunks of so many keys."""
        return (self.window or 0) * (-1 if self.has_chunked_window else 1)

    def window_if_limiting(self, longest: int) -> int | None:
        """The window in contexts of up to `longest` keys: None too where it hides none of them, as kernels are faster
        without. Not for deterministic backends: `longest` depends on the batch."""
        return None if self.window is None or self.window >= longest else self.window
