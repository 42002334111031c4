"""Histograms of the times between tokens, which are counted in bulk."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from quire.engine.client.engine_client import EngineClient
from quire.server.observe.metrics import ENGINE_LABEL, TOKEN_BUCKETS, BulkHistogram, Metrics
from tests.server.fake import FakeEngine

SPANS = st.lists(st.one_of(st.sampled_from([*TOKEN_BUCKETS, 0.0, 81.0]), st.floats(0, 100)), max_size=50)


@given(st.lists(SPANS, max_size=4))
def test_bulk_histogram_equals_prometheus_histogram(batches: list[list[float]]) -> None:
    name, text = "vllm:inter_token_latency_seconds", "Seconds."
    expected, actual = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram(name, text, ("model_name", "engine"), buckets=TOKEN_BUCKETS, registry=expected)
    spans = BulkHistogram(name, text, "m", TOKEN_BUCKETS)
    actual.register(spans)
    child = histogram.labels("m", ENGINE_LABEL)
    for batch in batches:
        spans.observe_sorted(sorted(batch))
        for span in batch:
            child.observe(span)

    def read(registry: CollectorRegistry) -> tuple[list[str], list[float]]:
        lines = [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
        sums = [float(line.split()[-1]) for line in lines if "_sum" in line]
        return [line for line in lines if "_sum" not in line], [round(each, 9) for each in sums]

    assert read(actual) == read(expected)


def test_pending_token_gaps_are_counted_on_read() -> None:
    client = EngineClient(FakeEngine(lambda request, position: 1))
    metrics = Metrics(client, "m", 64, {})
    metrics.rolling_stats.record_token_gap(0.03)
    metrics.rolling_stats.record_token_gap(0.5)
    assert b'vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 2.0' in Metrics.render_metrics([metrics])
    metrics.rolling_stats.record_token_gap(0.2)
    metrics.rolling_stats.bins_since(0)
    (second, *_) = metrics.rolling_stats._bins
    assert sum(each.between_tokens._buckets.total() for each in metrics.rolling_stats._bins) == 3
    assert second.between_tokens.percentiles() is not None
