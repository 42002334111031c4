from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.kernels.kv_quantization import UNIT_KV_SCALES, KVScales


@dataclass(frozen=True, slots=True)
class AttentionParams:
    scale: float
    window: int | None = None
    """Number of keys that a query sees, including its own. None: all keys."""
    softcap: float | None = None
    """With a softcap c, a score s becomes c * tanh(s / c)."""
    lookahead: int | None = 0
    """Number of later keys that a query sees. None: all later keys. On GPUs, only 0 has a kernel."""
    relative_bias: Tensor | None = None
    """[H, 2 L + 15] float32 for contexts of up to L tokens. Column L - 1 + d is added to the score of a key that is d
    tokens after the query. The last 16 columns are unused.
    """
    kv_scales: KVScales = UNIT_KV_SCALES
    sinks: Tensor | None = None
    """[H] float32: scores without a value, added to the softmax's denominator (gpt-oss, 2025)."""
    value_dim: int | None = None
    """If set, a value is the first value_dim elements of its key, and both caches are the same tensor."""
    has_chunked_window: bool = False
    """If True, windows start at multiples of their size (Llama 4, 2025)."""

    def first_visible_key(self, position: Any) -> Any:
        """`position` is a number or a tensor. The result may be below 0."""
        assert self.window is not None
        return position // self.window * self.window if self.has_chunked_window else position - self.window + 1

    def window_if_limiting(self, longest: int) -> int | None:
        """Return None, which is faster, if the window hides no key in contexts of up to `longest` tokens. Deterministic
        backends must not call this method, because `longest` depends on the batch.
        """
        return None if self.window is None or self.window >= longest else self.window
