"""Metrics whose values are read when Prometheus scrapes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.engine.client.engine_client import EngineClient
from quire.engine.common import clock
from quire.engine.common.scheduler_output import DRAFT_SOURCES
from quire.engine.core.stats import EngineStats
from quire.server.store.data_dir_status import OPEN_BATCHES_KEY, DataDirStatus

MetricFamilyClass = type[GaugeMetricFamily] | type[CounterMetricFamily]
LABELS = ("model_name", "engine")
GAUGES = (
    ("vllm:num_requests_running", "Requests in the running batch.", "running"),
    ("vllm:num_requests_waiting", "Requests waiting for a place in the batch.", "waiting"),
    ("quire:kv_pages_used", "KV blocks in use, counted per group of layers.", "used_blocks"),
    ("quire:kv_pages_kept", "KV blocks held for paused conversations; they are evicted last.", "kept_blocks"),
    ("quire:sessions_kept", "Conversations whose KV blocks are held.", "kept_sessions"),
    ("quire:kv_pages_saved", "KV blocks that requests would use in addition without sliding windows.", "saved_blocks"),
)
COUNTERS = (
    ("vllm:generation_tokens", "Tokens generated since the engine's start.", "generation_tokens"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hits"),
    ("vllm:num_preemptions", "Requests preempted because KV blocks ran out.", "preemptions"),
    ("quire:captured_steps", "Steps that a CUDA graph computed.", "captured_steps"),
    ("quire:captured_prompt_steps", "Of these, steps with prompt tokens.", "captured_prompt_steps"),
    ("vllm:spec_decode_num_drafts", "Times that draft tokens of a sequence were verified.", "drafts"),
    ("vllm:spec_decode_num_draft_tokens", "Tokens guessed.", "draft_tokens"),
    ("quire:session_returns", "Prompts that continued a conversation.", "session_returns"),
    ("quire:session_return_tokens", "Tokens of them that were cached.", "session_return_tokens"),
    (
        "quire:sessions_given_up",
        "Times that a conversation's held KV blocks were evicted because room was needed.",
        "sessions_given_up",
    ),
    ("quire:kv_load_seconds", "Seconds that requests waited for KV from tiers.", "load_seconds"),
    ("quire:experts_read", "Experts on disk that steps read, each once per step.", "experts_read"),
    ("quire:experts_kept", "Of these, the experts that were in memory.", "experts_kept"),
    ("quire:experts_guessed", "Experts on disk that were prefetched before the router chose them.", "experts_guessed"),
    ("quire:experts_guessed_right", "Of these, the experts that the router chose.", "experts_guessed_right"),
    ("quire:weights_disk_bytes", "Bytes that the engine has read from disk, if weights are on disk.", "disk_bytes"),
    (
        "quire:kv_pages_lost",
        "KV blocks that were not offloaded because they came faster than they could be written.",
        "pages_lost",
    ),
)
SOURCE_COUNTERS = (
    ("quire:spec_decode_num_draft_tokens_by_source", "Draft tokens, by source.", "draft_tokens_by_source"),
    (
        "quire:spec_decode_num_accepted_tokens_by_source",
        "Draft tokens that were accepted, by source.",
        "accepted_by_source",
    ),
)
STATE_GAUGES = (
    ("quire:engine_asleep", "1 while weights and KV cache are released (sleep).", "asleep"),
    ("quire:engine_responsive", "1 while the engine can compute; 0 while it is replaced or asleep.", "responsive"),
)
TIER_METRICS: tuple[tuple[MetricFamilyClass, str, str, str], ...] = (
    (GaugeMetricFamily, "quire:kv_tier_pages", "KV blocks in a tier below the KV cache.", "pages"),
    (GaugeMetricFamily, "quire:kv_tier_bytes", "Bytes of KV in a tier.", "bytes"),
    (GaugeMetricFamily, "quire:kv_tier_off", "1 if a tier hung and is no longer used.", "off"),
    (
        CounterMetricFamily,
        "quire:kv_tier_hit_tokens",
        "Tokens whose KV blocks were loaded from a tier.",
        "fetched_tokens",
    ),
    (CounterMetricFamily, "quire:kv_tier_fetched_bytes", "Bytes loaded from a tier.", "fetched_bytes"),
    (
        CounterMetricFamily,
        "quire:kv_tier_fetch_seconds",
        "Seconds spent loading KV blocks from tiers.",
        "fetch_seconds",
    ),
    (CounterMetricFamily, "quire:kv_tier_stored_bytes", "Bytes stored in a tier.", "stored_bytes"),
)
SUPERVISION_COUNTERS = (
    ("quire:engine_deaths", "Engines that died while running.", "deaths"),
    ("quire:request_replays", "Requests replayed after an engine died.", "replays"),
    ("quire:quarantined_requests", "Requests given up because they crash every engine.", "quarantined"),
)


class CallbackCollector(Collector):
    def __init__(self, read_metrics: Callable[[], Iterable[Metric]]) -> None:
        self._read_metrics = read_metrics

    def collect(self) -> Iterable[Metric]:
        return self._read_metrics()


def build_metric_family(
    kind: MetricFamilyClass, name: str, text: str, labels: Sequence[str], values: Mapping[Any, float]
) -> Metric:
    metric_family = kind(name, text, labels=labels)
    for label_values, value in values.items():
        metric_family.add_metric(label_values, value)
    return metric_family


def engine_metrics(client: EngineClient, model_name: str) -> Iterator[Metric]:
    engines, link = client.engine_core.engines, client.engine_core
    stats = [each.stats for each in engines]
    per_engine = partial(_per_engine, model_name)
    per_engine_and_label = partial(_per_engine_and_label, model_name)

    for name, text, field in GAUGES:
        yield per_engine(GaugeMetricFamily, name, text, [getattr(each, field) for each in stats])
    # Requests wait only for a slot or KV blocks, so vLLM's reason `deferred` is always 0.
    reasons = [{"capacity": each.waiting, "deferred": 0} for each in stats]
    name, text = "vllm:num_requests_waiting_by_reason", "Requests waiting, by reason."
    yield per_engine_and_label(GaugeMetricFamily, name, text, "reason", reasons)
    for name, text, field in STATE_GAUGES:
        yield per_engine(GaugeMetricFamily, name, text, [float(getattr(each, field)) for each in engines])
    usage = [each.used_blocks / each.total_blocks if each.total_blocks else 0.0 for each in stats]
    yield per_engine(GaugeMetricFamily, "vllm:kv_cache_usage_perc", "KV cache in use; 1 is all.", usage)
    for name, text, field in COUNTERS:
        yield per_engine(CounterMetricFamily, name, text, [getattr(each, field) for each in stats])
    yield from _draft_metrics(stats, model_name)
    for kind, name, text, field in TIER_METRICS if any(each.tiers for each in stats) else ():
        tiers = [{tier.name: getattr(tier, field) for tier in each.tiers} for each in stats]
        yield per_engine_and_label(kind, name, text, "tier", tiers)
    for name, text, field in SUPERVISION_COUNTERS:
        yield build_metric_family(CounterMetricFamily, name, text, LABELS[:1], {(model_name,): getattr(link, field)})


def _draft_metrics(stats: Sequence[EngineStats], model_name: str) -> Iterator[Metric]:
    accepted, text = [each.accepted_drafts for each in stats], "Draft tokens that were accepted"
    name = "vllm:spec_decode_num_accepted_tokens"
    yield _per_engine(model_name, CounterMetricFamily, name, f"{text}.", [sum(each) for each in accepted])
    if not any(accepted):
        return
    accepted_by_position = [{str(position): count for position, count in enumerate(each)} for each in accepted]
    name, text = f"{name}_per_pos", f"{text}, by position in the draft."
    yield _per_engine_and_label(model_name, CounterMetricFamily, name, text, "position", accepted_by_position)
    for name, text, field in SOURCE_COUNTERS:
        counts = [dict(zip(DRAFT_SOURCES, getattr(each, field), strict=False)) for each in stats]
        yield _per_engine_and_label(model_name, CounterMetricFamily, name, text, "source", counts)


def _per_engine(model_name: str, kind: MetricFamilyClass, name: str, text: str, values: Sequence[float]) -> Metric:
    values_by_labels = {(model_name, str(engine)): value for engine, value in enumerate(values)}
    return build_metric_family(kind, name, text, LABELS, values_by_labels)


def _per_engine_and_label(
    model_name: str, kind: MetricFamilyClass, name: str, text: str, label: str, values: Sequence[Mapping[str, float]]
) -> Metric:
    pairs = [(engine, key, value) for engine, each in enumerate(values) for key, value in each.items()]
    values_by_labels = {(model_name, str(engine), key): value for engine, key, value in pairs}
    return build_metric_family(kind, name, text, (*LABELS, label), values_by_labels)


def refusal_metrics(client: EngineClient, model_name: str, rejections: Mapping[str, int]) -> Iterator[Metric]:
    text = "Answers aborted because their clients did not read them."
    yield build_metric_family(
        CounterMetricFamily, "quire:slow_readers", text, LABELS[:1], {(model_name,): client.slow_readers}
    )
    values_by_labels = {(model_name, "0", reason): count for reason, count in rejections.items()}
    name, text = "vllm:admission_rejections", "Requests answered 503, by reason."
    yield build_metric_family(CounterMetricFamily, name, text, (*LABELS, "reason"), values_by_labels)


def adapters_in_use_metric(client: EngineClient, max_loras: int) -> Iterator[Metric]:
    """The value is the current time in Unix seconds."""
    labels = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
    adapters_in_use = (client.adapters(queued=True), client.adapters(queued=False))
    names = [",".join(sorted({adapter.name for adapter in adapters})) for adapters in adapters_in_use]
    text = "Adapters of the open requests."
    yield build_metric_family(
        GaugeMetricFamily, "vllm:lora_requests_info", text, labels, {(str(max_loras), *names): clock.time()}
    )


def data_dir_metrics(
    read_view: Callable[[], DataDirStatus], results: Collection[str], model_name: str
) -> Iterator[Metric]:
    view, model = read_view(), LABELS[:1]
    text = "Batches that have not ended."
    yield build_metric_family(
        GaugeMetricFamily, "quire:batches", text, model, {(model_name,): view.counts[OPEN_BATCHES_KEY]}
    )
    text = "Finished batch requests, by result."
    counts = {(model_name, result): view.counts[result] for result in results}
    yield build_metric_family(CounterMetricFamily, "quire:batch_requests", text, (*model, "result"), counts)
    text = "Streams that clients resumed."
    yield build_metric_family(
        CounterMetricFamily, "quire:streams_resumed", text, model, {(model_name,): view.counts["resumed"]}
    )
    sizes = {(model_name, kind): size for kind, size in view.sizes.items()}
    text = "Bytes stored in --data-dir."
    yield build_metric_family(GaugeMetricFamily, "quire:kept_bytes", text, (*model, "kind"), sizes)
    text = "1 while --data-dir cannot be written, as on a full disk: accepted requests wait."
    refused = {(model_name,): float(bool(view.refusal))}
    yield build_metric_family(GaugeMetricFamily, "quire:data_dir_refuses", text, model, refused)


def length_buckets(longest: int) -> list[int]:
    """Returns 1, 2, 5, 10, …, up to the first one >= `longest`."""
    buckets: list[int] = []
    while not buckets or buckets[-1] < longest:
        buckets.append((1, 2, 5)[len(buckets) % 3] * 10 ** (len(buckets) // 3))
    return buckets
