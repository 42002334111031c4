from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class BenchAnswer:
    """Times are seconds since the request was sent."""

    chunk_times: Sequence[float]
    prompt_tokens: int
    completion_tokens: int
    """The number of chunks if the server does not report tokens."""

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks. A chunk may have several tokens."""
        return [after - before for before, after in pairwise(self.chunk_times)]


@dataclass(frozen=True, slots=True)
class BenchFailure:
    message: str


@dataclass(frozen=True, slots=True)
class LatencyDistribution:
    """All values are in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class BenchSummary:
    requests: int
    failed: int
    errors: dict[str, int]
    seconds: float
    prompt_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    ttft_ms: LatencyDistribution | None
    itl_ms: LatencyDistribution | None
    """Gaps between chunks, over all streams."""
    tpot_ms: LatencyDistribution | None
    e2e_ms: LatencyDistribution | None


def percentile(ordered: Sequence[float], percent: float) -> float:
    return ordered[min(len(ordered) - 1, int(percent * len(ordered) / 100))]


def latency_distribution(seconds: Iterable[float]) -> LatencyDistribution | None:
    ordered = sorted(1000 * value for value in seconds)
    if not ordered:
        return None
    p50, p90, p99 = (percentile(ordered, percent) for percent in PERCENTILES)
    return LatencyDistribution(sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def latency_samples(answers: Sequence[BenchAnswer]) -> dict[str, list[float]]:
    """Returns samples in seconds, keyed by the fields of BenchSummary, whose values are in milliseconds."""
    return {
        "ttft_ms": [answer.chunk_times[0] for answer in answers],
        "itl_ms": [gap for answer in answers for gap in answer.gaps],
        "tpot_ms": [
            (answer.chunk_times[-1] - answer.chunk_times[0]) / (answer.completion_tokens - 1)
            for answer in answers
            if answer.completion_tokens > 1
        ],
        "e2e_ms": [answer.chunk_times[-1] for answer in answers],
    }


def summarize(results: Sequence[BenchAnswer | BenchFailure], seconds: float) -> BenchSummary:
    """`seconds`: from the first request to the last answer's end."""
    answers = [result for result in results if isinstance(result, BenchAnswer)]
    errors = Counter(result.message for result in results if isinstance(result, BenchFailure))
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    output_tokens = sum(answer.completion_tokens for answer in answers)
    return BenchSummary(
        requests=len(answers),
        failed=errors.total(),
        errors=dict(errors.most_common()),
        seconds=seconds,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_second=len(answers) / seconds,
        output_tokens_per_second=output_tokens / seconds,
        total_tokens_per_second=(prompt_tokens + output_tokens) / seconds,
        **{name: latency_distribution(samples) for name, samples in latency_samples(answers).items()},
    )


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Returns seconds, of a Poisson process. `rate` is in requests per second."""
    rng = random.Random(seed)
    return list(accumulate(rng.expovariate(rate) for _ in range(count)))
