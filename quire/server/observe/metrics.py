"""Prometheus metrics under vLLM's names, for its dashboards, and some under OpenTelemetry's."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.request_history import StepEntry, Timeline, TimelinePhase
from quire.engine.common.config import EngineConfig
from quire.engine.common.types import EngineInfo
from quire.server.observe.gen_ai_metrics import GenAiHistograms
from quire.server.observe.metric_collectors import (
    LABELS,
    CallbackCollector,
    adapters_in_use_metric,
    engine_metrics,
    length_buckets,
    refusal_metrics,
)
from quire.server.observe.metric_sums import LabelingCollector, PeerSample, SummingCollector, samples_of_registry
from quire.server.observe.prefix_report import MISS_REASON_TEXTS
from quire.server.observe.rolling_stats import RollingStats

FIRST_TOKEN_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
    2560.0,
)
TOKEN_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
REQUEST_BUCKETS = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
    7680.0,
)
PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PHASE_HISTOGRAMS: tuple[tuple[str, str, tuple[TimelinePhase, ...]], ...] = (
    ("request_queue_time_seconds", "Seconds until its first step.", ("queued",)),
    ("request_prefill_time_seconds", "Seconds from its first step to its first token.", ("prefill",)),
    (
        "request_decode_time_seconds",
        "Seconds from its first token to its last, interruptions included.",
        ("decode", "preempted", "recompute", "recovering"),
    ),
    (
        "request_inference_time_seconds",
        "Seconds from its first step to its last.",
        ("prefill", "decode", "preempted", "recompute", "recovering"),
    ),
)
"""Name, help text, and the timeline phases whose seconds are summed."""
REQUEST_HISTOGRAMS: tuple[tuple[str, str, Sequence[float] | None], ...] = (
    ("time_to_first_token_seconds", "Seconds to the first token.", FIRST_TOKEN_BUCKETS),
    ("request_time_per_output_token_seconds", "Mean seconds per token of a request.", TOKEN_BUCKETS),
    ("e2e_request_latency_seconds", "Seconds of a request.", REQUEST_BUCKETS),
    ("request_prompt_tokens", "Prompt tokens of a request.", None),
    ("request_generation_tokens", "Tokens generated for a request.", None),
    ("request_max_num_generation_tokens", "Tokens of the longest choice of a prompt.", None),
    ("request_params_n", "The n parameter.", (1, 2, 5, 10, 20)),
    ("request_params_max_tokens", "The max_tokens parameter.", None),
    ("iteration_tokens_total", "Prompt and answer tokens of a step.", STEP_TOKEN_BUCKETS),
    *((name, text, REQUEST_BUCKETS) for name, text, _ in PHASE_HISTOGRAMS),
    ("request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not cached.", None),
    ("request_num_preemptions", "Preemptions of a request.", PREEMPTION_BUCKETS),
)
"""None stands for token buckets up to the context length."""
FINISH_REASONS = ("stop", "length", "tool_calls", "abort", "error", "repetition", "timeout", "queue_timeout")

ENGINE_LABEL = "0"
"""vLLM's dashboards need an engine number, even for metrics of requests."""


class Metrics:
    def __init__(
        self, client: EngineClient, model_name: str, max_model_len: int, rejections: Mapping[str, int]
    ) -> None:
        self.model_name = model_name
        self._engine_registry = CollectorRegistry()  # equal in all API processes
        self._engine_registry.register(CallbackCollector(partial(engine_metrics, client, model_name)))
        self._registry = CollectorRegistry()  # counted by this process
        self._registry.register(CallbackCollector(partial(refusal_metrics, client, model_name, rejections)))
        help_text = "Seconds between the steps that gave a request tokens."
        self._inter_token_latency = BulkHistogram(
            "vllm:inter_token_latency_seconds", help_text, model_name, TOKEN_BUCKETS
        )
        self._registry.register(self._inter_token_latency)
        self.rolling_stats = RollingStats(client, self._inter_token_latency.observe_sorted)
        client.history.token_gap_listeners.append(self.rolling_stats.record_token_gap)
        lengths = length_buckets(max_model_len)

        self._histograms = {
            name: Histogram(f"vllm:{name}", text, LABELS, buckets=buckets or lengths, registry=self._registry).labels(
                model_name, ENGINE_LABEL
            )
            for name, text, buckets in REQUEST_HISTOGRAMS
        }
        counters = partial(_labeled_counters, self._registry, model_name)
        sources = ("local_compute", "local_cache_hit")
        self._tokens_by_source = counters("vllm:prompt_tokens_by_source", "Prompt tokens by source.", "source", sources)
        self._cached_tokens = counters("vllm:prompt_tokens_cached", "Prompt tokens cached.")
        client.history.listeners.append(self._observe_step)
        end_listeners = (PrefixMissCounters(self._registry, model_name), GenAiHistograms(self._registry, model_name))
        client.history.end_listeners += [self._observe_sequence, *(each.observe_sequence for each in end_listeners)]
        self._prompt_tokens = counters("vllm:prompt_tokens", "Prompt tokens processed.")
        self._finished_requests = counters(
            "vllm:request_success", "Finished requests.", "finished_reason", FINISH_REASONS
        )
        self._questions = counters("quire:questions", "Questions asked.", "type", ("predicate", "choice", "score"))
        self.receipt_counters = counters("quire:receipts", "Receipts of answers.", "to", ("answer", "log", "lost"))

    def _observe_histogram(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def count_questions_by_type(self, question_types: Iterable[str]) -> None:
        for question_type in question_types:
            if question_type in self._questions:
                self._questions[question_type].inc()

    def observe_first_token(self, seconds: float) -> None:
        self._observe_histogram("time_to_first_token_seconds", seconds)
        self.rolling_stats.update_current_bin().first_token.observe_sorted(seconds)

    def observe_finished_choice(
        self,
        reason: str,
        *,
        seconds: float,
        decode_seconds: float,
        prompt_tokens: int,
        generation_tokens: int,
        max_tokens: int | None,
    ) -> None:
        """`decode_seconds`: time from first to last token."""
        self._finished_requests[reason].inc()
        self._observe_histogram("e2e_request_latency_seconds", seconds)
        self._observe_histogram("request_prompt_tokens", prompt_tokens)
        self._prompt_tokens[""].inc(prompt_tokens)
        self._observe_histogram("request_generation_tokens", generation_tokens)
        if max_tokens is not None:
            self._observe_histogram("request_params_max_tokens", max_tokens)
        if generation_tokens > 1:
            self._observe_histogram("request_time_per_output_token_seconds", decode_seconds / (generation_tokens - 1))

    def observe_all_choices_finished(self, n: int, *, max_generation_tokens: int) -> None:
        self._observe_histogram("request_params_n", n)
        self._observe_histogram("request_max_num_generation_tokens", max_generation_tokens)

    def register_config_info(self, info: EngineInfo, config: EngineConfig) -> None:
        facts = {
            "block_size": info.block_size,
            "num_gpu_blocks": info.num_blocks,
            "kv_cache_size_tokens": info.num_blocks * info.block_size,
            "kv_cache_max_concurrency": round(info.num_blocks * info.page_groups / info.context_pages, 2),
            "cache_dtype": info.dtype if info.kv_cache_dtype == "auto" else info.kv_cache_dtype,
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
        }
        names = ("engine", *facts)
        gauge = Gauge("vllm:cache_config_info", "Layout of the KV cache.", names, registry=self._engine_registry)
        states = info.state_bytes
        numbers = {
            Gauge(f"quire:{name}", what, ("engine",), registry=self._engine_registry): value
            for name, what, value in (
                (
                    "state_bytes",
                    "Bytes of recurrent states in each slot.",
                    states,
                ),
                ("ranks", "Processes that compute the model together.", config.world_size),
                ("nodes", "Machines that they are on.", config.nnodes),
            )
        }
        for engine in map(str, range(config.data_parallel_size)):
            gauge.labels(engine=engine, **{name: str(value) for name, value in facts.items()}).set(1)
            for each, value in numbers.items():
                each.labels(engine=engine).set(value)

    def register_adapter_metrics(self, client: EngineClient, max_loras: int) -> None:
        self._engine_registry.register(CallbackCollector(partial(adapters_in_use_metric, client, max_loras)))

    def _observe_step(self, step: StepEntry) -> None:
        if step.is_counted:
            prompts = sum(count for _, _, count in step.record.chunks)
            self._observe_histogram("iteration_tokens_total", prompts + step.record.num_generated_tokens)
        self.rolling_stats.flush_token_gaps()  # gaps of the previous step

    def _observe_sequence(self, timeline: Timeline) -> None:
        seconds = timeline.phase_seconds(timeline.ended_at or timeline.submitted_at)
        self._observe_histogram("request_num_preemptions", timeline.count_phase("preempted"))
        if timeline.cached_tokens is None:
            return
        for name, _, phases in PHASE_HISTOGRAMS:
            self._observe_histogram(name, sum(seconds.get(phase, 0.0) for phase in phases))
        cached = timeline.cached_tokens or 0
        computed = timeline.prompt_tokens - cached
        self._observe_histogram("request_prefill_kv_computed_tokens", computed)
        self._tokens_by_source["local_compute"].inc(computed)
        self._tokens_by_source["local_cache_hit"].inc(cached)
        self._cached_tokens[""].inc(cached)

    def collect_samples(self) -> list[PeerSample]:
        self.rolling_stats.flush_token_gaps()
        return samples_of_registry(self._registry)

    @staticmethod
    def render_metrics(
        models: Sequence[Metrics],
        peer_samples: Sequence[PeerSample] = (),
        extra_registries: Iterable[CollectorRegistry] = (),
    ) -> bytes:
        """Returns Prometheus text format. `extra_registries` belong to no model."""
        for each in models:
            each.rolling_stats.flush_token_gaps()
        label = "model_name" if len(models) > 1 else ""
        engines = CollectorRegistry()
        summed = CollectorRegistry()
        engines.register(LabelingCollector(label, {each.model_name: each._engine_registry.collect for each in models}))
        counted = LabelingCollector(label, {each.model_name: each._registry.collect for each in models})
        summed.register(SummingCollector(counted, peer_samples))
        return b"".join(generate_latest(each) for each in (engines, summed, *extra_registries))


def _labeled_counters(
    registry: CollectorRegistry, model_name: str, name: str, text: str, label: str = "", values: Sequence[str] = ("",)
) -> dict[str, Counter]:
    """Without a label, the only key is ""."""
    counter = Counter(name, text, (*LABELS, label) if label else LABELS, registry=registry)
    return {value: counter.labels(model_name, ENGINE_LABEL, *([value] if label else [])) for value in values}


class PrefixMissCounters:
    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        text = "Prompt tokens that were computed before, but were not found in the prefix cache."
        tokens = Counter("quire:prefix_missed_tokens", text, (*LABELS, "reason"), registry=registry)
        self._tokens = {reason: tokens.labels(model_name, "0", reason) for reason in MISS_REASON_TEXTS}
        text = "Seconds of steps spent recomputing them."
        seconds = Counter("quire:prefix_missed_seconds", text, LABELS, registry=registry)
        self._seconds = seconds.labels(model_name, "0")

    def observe_sequence(self, timeline: Timeline) -> None:
        if (report := timeline.prefix_report) is not None:
            for reason, tokens in report.tokens_by_reason:
                self._tokens[reason].inc(tokens)
            self._seconds.inc(report.compute_seconds)


class BulkHistogram(Collector):
    def __init__(self, name: str, text: str, model_name: str, bounds: Sequence[float]) -> None:
        """`bounds` are the upper ends of the buckets in seconds, ascending. One more bucket counts longer durations."""
        self._name = name
        self._text = text
        self._labels = (model_name, ENGINE_LABEL)
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe_sorted(self, spans: Sequence[float]) -> None:
        """`spans`: ascending, in seconds."""
        start = 0
        while start < len(spans):
            bucket = bisect_left(self._bounds, spans[start])
            end = bisect_right(spans, self._bounds[bucket], start) if bucket < len(self._bounds) else len(spans)
            self._counts[bucket] += end - start
            start = end
        self._sum += sum(spans)

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=LABELS)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        family.add_metric(self._labels, list(zip(names, accumulate(self._counts), strict=True)), self._sum)
        yield family
