from __future__ import annotations

from collections.abc import Sequence

_EMA_WEIGHT = 0.2
_MIN_STEP_TOKENS = 32
"""Smaller steps are not measured, because they do not show the cost of prompt tokens."""
_PROBE_INTERVAL = 32
"""After this many decisions against loading, load anyway, because the tier may be fast again."""


class LoadCosts:
    """Decides by measured costs whether to load or to compute blocks. A tier without measurements counts as free."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.token_seconds: float | None = None
        self.block_seconds: dict[str, float] = {}
        """Keyed by tier."""
        self._num_refused = 0

    def record_compute(self, tokens: int, seconds: float) -> None:
        if tokens >= _MIN_STEP_TOKENS:
            self.token_seconds = _moving_average(self.token_seconds, seconds / tokens)

    def record_load(self, tier: str, num_blocks: int, seconds: float) -> None:
        self.block_seconds[tier] = _moving_average(self.block_seconds.get(tier), seconds / num_blocks)

    def num_blocks_worth_loading(self, tiers: Sequence[str]) -> int:
        """Number of leading blocks whose loading saves the most time, or sometimes all, see _PROBE_INTERVAL."""
        if self.token_seconds is None:
            return len(tiers)
        compute_seconds = self.token_seconds * self._block_tokens
        best_count = 0
        most_saved = 0.0
        saved_seconds = 0.0
        for count, tier in enumerate(tiers, 1):
            saved_seconds += compute_seconds - self.block_seconds.get(tier, 0.0)
            if saved_seconds > most_saved:
                best_count, most_saved = count, saved_seconds
        if best_count == 0 and tiers:
            self._num_refused += 1
            if self._num_refused > _PROBE_INTERVAL:
                best_count = len(tiers)
        if best_count:
            self._num_refused = 0
        return best_count


def _moving_average(before: float | None, now: float) -> float:
    return now if before is None else before + _EMA_WEIGHT * (now - before)
