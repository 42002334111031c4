from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.kernels.kv_quantization import UNIT_KV_SCALES, KVScales


@dataclass(frozen=True, slots=True)
class AttentionParams:
    scale: float
    window: int | None = None
    """Keys that a query sees, including its own; None: all."""
    softcap: float | None = None
    """c turns a score s into c * tanh(s / c)."""
    lookahead: int | None = 0
    """Later keys that a query sees; None: all. On GPUs the torch backend computes None, and the reference everything
    else but 0.
    """
    relative_bias: Tensor | None = None
    """[H, 2 L + 15] float32 for contexts of up to L tokens. Column L - 1 + d is added to the score of a key that is d
    tokens after the query. The last 16 columns are unused.
    """
    kv_scales: KVScales = UNIT_KV_SCALES
    sinks: Tensor | None = None
    """[H] float32: scores without a value, added to the softmax's denominator (gpt-oss, 2025)."""
    value_dim: int | None = None
    """The value is the first value_dim numbers of the key. Both caches are the same tensor."""
    has_chunked_window: bool = False
    """Windows start at multiples of their size (Llama 4, 2025)."""

    def first_visible_key(self, position: Any) -> Any:
        """May be below 0. position: number or tensor."""
        assert self.window is not None
        return position // self.window * self.window if self.has_chunked_window else position - self.window + 1

    def window_if_limiting(self, longest: int) -> int | None:
        """None, which is faster, if the window hides no key in contexts of up to `longest` tokens. Deterministic
        backends must not call it, because `longest` depends on the batch.
        """
        return None if self.window is None or self.window >= longest else self.window
