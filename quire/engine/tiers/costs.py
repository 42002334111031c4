"""Whether to fetch a prefix or to compute it: what each costs here, as measured while both are done."""

from __future__ import annotations

from collections.abc import Sequence

_WEIGHT = 0.2
"""Of the newest measurement in an average."""
_LEAST_TOKENS = 32
"""Steps of fewer tokens do not say what a prompt's tokens cost."""
_PROBE = 32
"""After so many refusals in a row pages are fetched all the same: what made it slow may be over."""


class Costs:
    """Running averages. What was never measured counts as free to fetch, so that it gets measured."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self.token_seconds: float | None = None
        """To compute one token of a prompt."""
        self.page_seconds: dict[str, float] = {}
        """To fetch one page, by tier."""
        self._refused = 0

    def computed(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens."""
        if tokens >= _LEAST_TOKENS:
            self.token_seconds = _average(self.token_seconds, seconds / tokens)

    def fetched(self, tier: str, pages: int, seconds: float) -> None:
        self.page_seconds[tier] = _average(self.page_seconds.get(tier), seconds / pages)

    def worthwhile(self, tiers: Sequence[str]) -> int:
        """How many of a prefix's pages to fetch, the first ones, where `tiers` names the tier of each: as many as save
        most time over computing them."""
        if self.token_seconds is None:
            return len(tiers)
        each = self.token_seconds * self._page_tokens
        best, most, saved = 0, 0.0, 0.0
        for count, tier in enumerate(tiers, 1):
            saved += each - self.page_seconds.get(tier, 0.0)
            if saved > most:
                best, most = count, saved
        if best == 0 and tiers:
            self._refused += 1
            if self._refused > _PROBE:
                best = len(tiers)
        if best:
            self._refused = 0
        return best


def _average(before: float | None, now: float) -> float:
    return now if before is None else before + _WEIGHT * (now - before)
