"""Statistics of a server's last minutes in bins of one second, so that a chart shows what was before it was opened.

Percentiles come from logarithmic buckets 10 % wide (as HdrHistogram and DDSketch do), so a bin costs the same however
many tokens fall into it. The times between tokens are gathered, sorted and counted together: one by one they would take
a sixth of the server's time for a token.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.engine import clock
from quire.engine.link.client import EngineClient

KEPT_SECONDS = 300
_WIDTH = math.log(1.1)
_LEAST = 1e-6
MOST_GAPS = 1024
"""Times between tokens that wait to be counted."""
PERCENTILES = (0.5, 0.95)


class LatencyHistogram:
    """A distribution of durations, exact to about 5 %."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()

    def add(self, *seconds: float) -> None:
        """`seconds` ascend."""
        at = 0
        while at < len(seconds):
            bucket = round(math.log(max(seconds[at], _LEAST)) / _WIDTH)
            end = max(at + 1, bisect_left(seconds, math.exp((bucket + 0.5) * _WIDTH), at))
            self._buckets[bucket] += end - at
            at = end

    def percentiles(self) -> list[float] | None:
        """The PERCENTILES, in seconds; None when nothing was added."""
        total = self._buckets.total()
        return [self._quantile(share * total) for share in PERCENTILES] if total else None

    def _quantile(self, rank: float) -> float:
        passed = 0
        for bucket in sorted(self._buckets):
            passed += self._buckets[bucket]
            if passed >= rank:
                break
        return math.exp(bucket * _WIDTH)


@dataclass(slots=True)
class Bin:
    second: int
    generated: int = 0
    prompt: int = 0
    first_token: LatencyHistogram = field(default_factory=LatencyHistogram)
    between_tokens: LatencyHistogram = field(default_factory=LatencyHistogram)

    def as_dict(self) -> dict[str, object]:
        return {
            "second": self.second,
            "generation_tokens": self.generated,
            "prompt_tokens": self.prompt,
            "first_token": self.first_token.percentiles(),
            "between_tokens": self.between_tokens.percentiles(),
        }


class RollingStats:
    """Counts tokens and durations by the second. A second without tokens has no bin."""

    def __init__(self, client: EngineClient, count_gaps: Callable[[Sequence[float]], None]) -> None:
        """`count_gaps` is told of the times between tokens too, many at once and ascending, by `count`."""
        self._client = client
        self._count_gaps = count_gaps
        self._gaps: list[float] = []
        """Times between tokens that are to be counted in `_gaps_bin`."""
        self._gaps_bin = Bin(0)
        self._bins: deque[Bin] = deque()
        self._generated, self._prompt = client.link.stats.generation_tokens, client.link.stats.prompt_tokens

    def since(self, second: int) -> list[Bin]:
        """The complete bins since `second` of the Unix clock, oldest first."""
        self.count()
        now = int(clock.time())
        return [each for each in self._bins if second <= each.second < now]

    def next_token(self, seconds: float) -> None:
        """A step gave a request tokens so long after the last one that did."""
        if not self._gaps:
            self._gaps_bin = self.now()
        self._gaps.append(seconds)
        if len(self._gaps) == MOST_GAPS:
            self.count()

    def count(self) -> None:
        """Count the times between tokens that were gathered."""
        if self._gaps:
            gaps, self._gaps = sorted(self._gaps), []
            self._gaps_bin.between_tokens.add(*gaps)
            self._count_gaps(gaps)

    def now(self) -> Bin:
        """The bin of the current second, with the tokens since the last call added. Call it when tokens came."""
        second = int(clock.time())
        if not self._bins or self._bins[-1].second < second:
            self._bins.append(Bin(second))
            while self._bins[0].second < second - KEPT_SECONDS:
                self._bins.popleft()
        current, stats = self._bins[-1], self._client.link.stats
        # The engine's own counters stay right when its outputs are merged on their way.
        current.generated += stats.generation_tokens - self._generated
        current.prompt += stats.prompt_tokens - self._prompt
        self._generated, self._prompt = stats.generation_tokens, stats.prompt_tokens
        return current
