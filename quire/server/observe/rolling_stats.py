"""Statistics of the last minutes in one-second bins. Buckets are logarithmic, 10 % wide (as in HdrHistogram and
DDSketch), so that a bin's cost does not grow with its tokens. Token gaps are counted in bulk, because one by one they
would take a sixth of the server's time per token.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.engine.client.engine_client import EngineClient
from quire.engine.common import clock

HISTORY_SECONDS = 300
_LOG_BUCKET_WIDTH = math.log(1.1)
_MIN_SECONDS = 1e-6
MAX_PENDING_GAPS = 1024
PERCENTILES = (0.5, 0.95)


class LatencyHistogram:
    """A distribution of durations, exact to about 5 %."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()

    def observe_sorted(self, *seconds: float) -> None:
        start = 0
        while start < len(seconds):
            bucket = round(math.log(max(seconds[start], _MIN_SECONDS)) / _LOG_BUCKET_WIDTH)
            end = max(start + 1, bisect_left(seconds, math.exp((bucket + 0.5) * _LOG_BUCKET_WIDTH), start))
            self._buckets[bucket] += end - start
            start = end

    def percentiles(self) -> list[float] | None:
        """PERCENTILES in seconds."""
        total = self._buckets.total()
        return [self._value_at_rank(share * total) for share in PERCENTILES] if total else None

    def _value_at_rank(self, rank: float) -> float:
        passed = 0
        for bucket in sorted(self._buckets):
            passed += self._buckets[bucket]
            if passed >= rank:
                break
        return math.exp(bucket * _LOG_BUCKET_WIDTH)


@dataclass(slots=True)
class SecondBin:
    second: int
    generated_tokens: int = 0
    prompt_tokens: int = 0
    first_token: LatencyHistogram = field(default_factory=LatencyHistogram)
    between_tokens: LatencyHistogram = field(default_factory=LatencyHistogram)

    def to_json(self) -> dict[str, object]:
        return {
            "second": self.second,
            "generation_tokens": self.generated_tokens,
            "prompt_tokens": self.prompt_tokens,
            "first_token": self.first_token.percentiles(),
            "between_tokens": self.between_tokens.percentiles(),
        }


class RollingStats:
    """A second without tokens has no bin."""

    def __init__(self, client: EngineClient, gap_listener: Callable[[Sequence[float]], None]) -> None:
        """`gap_listener` is called with many gaps at once, in ascending order."""
        self._client = client
        self._gap_listener = gap_listener
        self._gaps: list[float] = []
        self._gaps_bin = SecondBin(0)
        self._bins: deque[SecondBin] = deque()
        self._generated_tokens, self._prompt_tokens = (
            client.engine_core.stats.generation_tokens,
            client.engine_core.stats.prompt_tokens,
        )

    def bins_since(self, second: int) -> list[SecondBin]:
        """Returns complete bins from Unix time `second` on, oldest first."""
        self.flush_token_gaps()
        now = int(clock.time())
        return [each for each in self._bins if second <= each.second < now]

    def record_token_gap(self, seconds: float) -> None:
        """`seconds` lie between two successive steps in which a request got tokens."""
        if not self._gaps:
            self._gaps_bin = self.update_current_bin()
        self._gaps.append(seconds)
        if len(self._gaps) == MAX_PENDING_GAPS:
            self.flush_token_gaps()

    def flush_token_gaps(self) -> None:
        if self._gaps:
            gaps, self._gaps = sorted(self._gaps), []
            self._gaps_bin.between_tokens.observe_sorted(*gaps)
            self._gap_listener(gaps)

    def update_current_bin(self) -> SecondBin:
        """Call this when tokens have arrived."""
        second = int(clock.time())
        if not self._bins or self._bins[-1].second < second:
            self._bins.append(SecondBin(second))
            while self._bins[0].second < second - HISTORY_SECONDS:
                self._bins.popleft()
        current, stats = self._bins[-1], self._client.engine_core.stats
        # Uses the engine's counters, which stay right even if outputs are merged on the way.
        current.generated_tokens += stats.generation_tokens - self._generated_tokens
        current.prompt_tokens += stats.prompt_tokens - self._prompt_tokens
        self._generated_tokens, self._prompt_tokens = stats.generation_tokens, stats.prompt_tokens
        return current
