"""Prometheus metrics under vLLM's names, so that its dashboards work here."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.engine.client.client import EngineClient
from quire.engine.client.history import Timeline
from quire.engine.config import EngineConfig
from quire.engine.types import EngineInfo
from quire.server.observe.rolling_stats import RollingStats

FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PHASES = (
    ("vllm:request_queue_time_seconds", "Seconds until its first step.", ("queued",)),
    ("vllm:request_prefill_time_seconds", "Seconds from its first step to its first token.", ("prefill",)),
    (
        "vllm:request_decode_time_seconds",
        "Seconds from its first token to its last, interruptions included.",
        ("decode", "preempted", "recompute", "recovering"),
    ),
    (
        "vllm:request_inference_time_seconds",
        "Seconds from its first step to its last.",
        ("prefill", "decode", "preempted", "recompute", "recovering"),
    ),
)
"""Name, help text and the phases of engine/client/history.py that it adds up."""
FINISH_REASONS = ("stop", "length", "tool_calls", "abort", "error", "repetition", "timeout", "queue_timeout")
GAUGES = (
    ("vllm:num_requests_running", "Requests in the running batch.", "running"),
    ("vllm:num_requests_waiting", "Requests waiting for a place in the batch.", "waiting"),
)
COUNTERS = (
    ("vllm:generation_tokens", "Tokens generated since the engine's start.", "generation_tokens"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hits"),
    ("vllm:num_preemptions", "Requests preempted for want of KV blocks.", "preemptions"),
)
SUPERVISION = (
    ("quire:engine_deaths", "Engines that died under way.", "deaths"),
    ("quire:request_replays", "Requests submitted again after a death.", "replays"),
    ("quire:quarantined_requests", "Requests given up because they end every engine.", "quarantined"),
    ("quire:slow_readers", "Answers given up because nobody read them.", "slow_readers"),
)


class Metrics:
    """A server's metrics, in a registry of their own. The label is the model's name."""

    def __init__(self, client: EngineClient, model_name: str, max_model_len: int) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(client, model_name))
        self.recent = RollingStats(client)
        labels = ("model_name",)
        lengths = length_buckets(max_model_len)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            made = Histogram(name, text, labels, buckets=tuple(buckets), registry=self._registry)
            child = made.labels(model_name)
            assert isinstance(child, Histogram)
            return child

        self._first_token = histogram(
            "vllm:time_to_first_token_seconds", "Seconds to the first token.", FIRST_TOKEN_SECONDS
        )
        self._next_token = histogram(
            "vllm:inter_token_latency_seconds", "Seconds between the steps of one stream.", TOKEN_SECONDS
        )
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean seconds per token of a request.", TOKEN_SECONDS
        )
        self._seconds = histogram("vllm:e2e_request_latency_seconds", "Seconds of a request.", REQUEST_SECONDS)
        self._prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", lengths)
        self._generation = histogram("vllm:request_generation_tokens", "Tokens generated for a request.", lengths)
        self._longest = histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of the longest choice of a prompt.", lengths
        )
        self._n = histogram("vllm:request_params_n", "The n parameter.", (1, 2, 5, 10, 20))
        self._max_tokens = histogram("vllm:request_params_max_tokens", "The max_tokens parameter.", lengths)
        self._step_tokens = histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", STEP_TOKENS)
        self._phases = [(histogram(name, text, REQUEST_SECONDS), phases) for name, text, phases in PHASES]
        self._computed = histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens of a request that no cache held.", lengths
        )
        source = Counter(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where from.", (*labels, "source"), registry=self._registry
        )
        self._sources = [source.labels(model_name, each) for each in ("local_compute", "local_cache_hit")]
        cached_total = Counter("vllm:prompt_tokens_cached", "Prompt tokens cached.", labels, registry=self._registry)
        self._cached_total = cached_total.labels(model_name)
        client.history.listeners.append(lambda step: self._step_tokens.observe(step.record.tokens))
        client.history.end_listeners.append(self._ended)
        prompt_total = Counter("vllm:prompt_tokens", "Prompt tokens processed.", labels, registry=self._registry)
        self._prompt_total = prompt_total.labels(model_name)
        success = Counter(
            "vllm:request_success", "Finished requests.", (*labels, "finished_reason"), registry=self._registry
        )
        self._success = {reason: success.labels(model_name, reason) for reason in FINISH_REASONS}

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)
        self.recent.now().first_token.add(seconds)

    def next_token(self, seconds: float) -> None:
        self._next_token.observe(seconds)
        self.recent.now().between_tokens.add(seconds)

    def choice_ended(
        self,
        reason: str,
        *,
        seconds: float,
        decode_seconds: float,
        prompt_tokens: int,
        generation_tokens: int,
        max_tokens: int | None,
    ) -> None:
        """One choice has ended. decode_seconds is the time from its first token to its last."""
        self._success[reason].inc()
        self._seconds.observe(seconds)
        self._prompt.observe(prompt_tokens)
        self._prompt_total.inc(prompt_tokens)
        self._generation.observe(generation_tokens)
        if max_tokens is not None:
            self._max_tokens.observe(max_tokens)
        if generation_tokens > 1:
            self._per_token.observe(decode_seconds / (generation_tokens - 1))

    def prompt_ended(self, n: int, *, longest: int) -> None:
        """All n choices of a prompt have ended, the longest with so many tokens."""
        self._n.observe(n)
        self._longest.observe(longest)

    def tell_cache(self, info: EngineInfo, config: EngineConfig) -> None:
        """How the KV cache is cut; as in vLLM, in the labels of a metric that is always 1."""
        facts = {
            "block_size": info.block_size,
            "num_gpu_blocks": info.num_blocks,
            "cache_dtype": info.dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
        }
        gauge = Gauge("vllm:cache_config_info", "How the KV cache is cut.", tuple(facts), registry=self._registry)
        gauge.labels(**{name: str(value) for name, value in facts.items()}).set(1)

    def _ended(self, timeline: Timeline) -> None:
        seconds = timeline.phases(timeline.ended or timeline.submitted)
        if timeline.first_token is None:
            return
        for made, phases in self._phases:
            made.observe(sum(seconds.get(phase, 0.0) for phase in phases))
        cached = timeline.cached_tokens or 0
        computed = timeline.prompt_tokens - cached
        self._computed.observe(computed)
        self._sources[0].inc(computed)
        self._sources[1].inc(cached)
        self._cached_total.inc(cached)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class EngineCollector(Collector):
    """Reads the engine's latest statistics when Prometheus asks."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self._client = client
        self._labels = [model_name]

    def collect(self) -> Iterable[Metric]:
        stats = self._client.stats
        for name, text, field in GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric(self._labels, getattr(stats, field))
            yield gauge
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "KV cache in use; 1 is all.", labels=["model_name"])
        usage.add_metric(self._labels, stats.used_blocks / stats.total_blocks if stats.total_blocks else 0.0)
        yield usage
        for source, counters in ((stats, COUNTERS), (self._client, SUPERVISION)):
            for name, text, field in counters:
                counter = CounterMetricFamily(name, text, labels=["model_name"])
                counter.add_metric(self._labels, getattr(source, field))
                yield counter


def length_buckets(longest: int) -> list[int]:
    """1, 2, 5, 10, … up to the first that holds the longest."""
    buckets: list[int] = []
    while not buckets or buckets[-1] < longest:
        buckets.append((1, 2, 5)[len(buckets) % 3] * 10 ** (len(buckets) // 3))
    return buckets
