"""Engine metrics under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.core.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Metric:
    name: str


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    value: float


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A count since the engine's start."""

    value: int


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Counts by position in a draft."""

    values: list[int]


def make_engine_metrics(stats: EngineStats) -> list[Metric]:
    used = stats.used_blocks / stats.total_blocks if stats.total_blocks else 0.0
    return [
        Gauge("vllm:num_requests_running", stats.running),
        Gauge("vllm:num_requests_waiting", stats.waiting),
        Gauge("vllm:kv_cache_usage_perc", used),
        Counter("vllm:prompt_tokens", stats.prompt_tokens),
        Counter("vllm:generation_tokens", stats.generation_tokens),
        Counter("vllm:prefix_cache_queries", stats.prefix_queries),
        Counter("vllm:prefix_cache_hits", stats.prefix_hits),
        Counter("vllm:num_preemptions", stats.preemptions),
        Counter("vllm:spec_decode_num_drafts", stats.drafts),
        Counter("vllm:spec_decode_num_draft_tokens", stats.draft_tokens),
        Counter("vllm:spec_decode_num_accepted_tokens", sum(stats.accepted_drafts)),
        Vector("vllm:spec_decode_num_accepted_tokens_per_pos", list(stats.accepted_drafts)),
    ]
