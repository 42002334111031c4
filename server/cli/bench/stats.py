"""What was measured and what it comes to; pure functions."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole stream. Times in seconds since its request was sent."""

    times: Sequence[float]
    """When each chunk that carries tokens came; at least one."""
    prompt_tokens: int
    completion_tokens: int
    """By the server's own count, or the number of chunks where it gave none."""

    @property
    def gaps(self) -> list[float]:
        """Between chunks. A server may send several tokens in one."""
        return [after - before for before, after in pairwise(self.times)]


@dataclass(frozen=True, slots=True)
class Failure:
    message: str


@dataclass(frozen=True, slots=True)
class Distribution:
    """In milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Summary:
    requests: int
    failed: int
    errors: dict[str, int]
    """Messages and how often each came."""
    seconds: float
    prompt_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    """Inter-token latency: gaps between chunks of one stream, of all streams together."""
    tpot_ms: Distribution | None
    """Time per output token after the first: one figure per request, whatever its chunks."""
    e2e_ms: Distribution | None


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value that `percent` of the sorted values lie below; one of them, without interpolation."""
    return ordered[min(len(ordered) - 1, int(percent * len(ordered) / 100))]


def distribution(seconds: Iterable[float]) -> Distribution | None:
    """None of no values."""
    ordered = sorted(1000 * value for value in seconds)
    if not ordered:
        return None
    p50, p90, p99 = (percentile(ordered, percent) for percent in PERCENTILES)
    return Distribution(sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def latencies(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Samples in seconds, under the names of Summary's distributions."""
    return {
        "ttft_ms": [answer.times[0] for answer in answers],
        "itl_ms": [gap for answer in answers for gap in answer.gaps],
        "tpot_ms": [
            (answer.times[-1] - answer.times[0]) / (answer.completion_tokens - 1)
            for answer in answers
            if answer.completion_tokens > 1
        ],
        "e2e_ms": [answer.times[-1] for answer in answers],
    }


def summarize(results: Sequence[Answer | Failure], seconds: float) -> Summary:
    """`seconds`: from the first request sent to the last answer's end. Failed requests count in `errors` only."""
    answers = [result for result in results if isinstance(result, Answer)]
    errors = Counter(result.message for result in results if isinstance(result, Failure))
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    output_tokens = sum(answer.completion_tokens for answer in answers)
    return Summary(
        requests=len(answers),
        failed=errors.total(),
        errors=dict(errors.most_common()),
        seconds=seconds,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_second=len(answers) / seconds,
        output_tokens_per_second=output_tokens / seconds,
        total_tokens_per_second=(prompt_tokens + output_tokens) / seconds,
        **{name: distribution(samples) for name, samples in latencies(answers).items()},
    )


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which `count` requests are sent, `rate` a second on average: a Poisson process."""
    rng = random.Random(seed)
    return list(accumulate(rng.expovariate(rate) for _ in range(count)))
