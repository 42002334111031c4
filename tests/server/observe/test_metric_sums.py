"""Metrics of several processes, added up."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from quire.server.encoding import encode_msgpack
from quire.server.observe.metric_sums import LabelingCollector, SummingCollector, decode_samples, samples_of_registry
from quire.server.observe.recent_answers import merge_answer_summaries


def registry(hits: dict[str, int], seconds: list[float]) -> CollectorRegistry:
    collectors = CollectorRegistry()
    counter = Counter("hits", "Hits.", ["by"], registry=collectors)
    for by, count in hits.items():
        counter.labels(by).inc(count)
    histogram = Histogram("seconds", "Seconds.", buckets=(1.0, 2.0), registry=collectors)
    for each in seconds:
        histogram.observe(each)
    return collectors


def sample_values(source: CollectorRegistry) -> dict[str, float]:
    lines = [
        line for line in generate_latest(source).decode().splitlines() if line[0] != "#" and "_created" not in line
    ]
    return {line.split()[0]: float(line.split()[1]) for line in lines}


def test_summing_collector_adds_counts_of_peers() -> None:
    local = registry({"a": 2, "b": 3}, [0.5])
    others = [registry({"b": 10, "c": 7}, [0.5, 1.5]), registry({}, [5.0])]
    peer_samples = [count for each in others for count in decode_samples(encode_msgpack(samples_of_registry(each)))]
    merged = CollectorRegistry()
    merged.register(SummingCollector(local, peer_samples))
    assert sample_values(merged) == {
        'hits_total{by="a"}': 2.0,
        'hits_total{by="b"}': 13.0,
        'hits_total{by="c"}': 7.0,
        'seconds_bucket{le="1.0"}': 2.0,
        'seconds_bucket{le="2.0"}': 3.0,
        'seconds_bucket{le="+Inf"}': 4.0,
        "seconds_count": 4.0,
        "seconds_sum": 7.5,
    }
    assert sample_values(local)['hits_total{by="b"}'] == 3.0


def test_summing_collector_without_peers_shows_local_counts() -> None:
    local, merged = registry({"a": 2}, [0.5]), CollectorRegistry()
    merged.register(SummingCollector(local, []))
    assert sample_values(merged) == sample_values(local)


def test_answer_summaries_of_processes_are_merged() -> None:
    def answers(*begun: int) -> list[dict[str, object]]:
        return [{"id": str(at), "created": at, "wall_ms": 100.0} for at in begun]

    def tenant(name: str, open_: int, tokens: int) -> dict[str, object]:
        return {
            **{"name": name, "requests": 3, "open": open_, "weight": 2.0},
            **{"computed_tokens": 10, "output_tokens": tokens, "share": 1.0},
        }

    one = {"data": answers(9, 4), "remembered": 2, "tenants": [tenant("x", 1, 0)], "other_tenants": 0}
    two = {"data": answers(7, 5), "remembered": 8, "tenants": [tenant("y", 0, 30), tenant("x", 2, 0)]}
    merged = merge_answer_summaries([one, two | {"other_tenants": 0}], 3)
    assert [each["id"] for each in merged["data"]] == ["9", "7", "5"]
    assert (merged["remembered"], merged["other_tenants"]) == (10, 0)
    y, x = merged["tenants"]
    assert (y["name"], x["name"]) == ("y", "x")
    assert (x["requests"], x["open"], x["computed_tokens"], x["weight"]) == (6, 3, 20, 2.0)
    assert x["share"] + y["share"] == 1.0


def test_labeling_collector_labels_each_part() -> None:
    """The parts are models in one process, or replicas whose metrics arrive as text."""
    parts = {"one": registry({"a": 2}, [0.5]), "two": registry({"a": 3, "b": 1}, [1.5])}
    texts = {name: generate_latest(each).decode() for name, each in parts.items()}
    read = {name: partial(text_string_to_metric_families, text) for name, text in texts.items()}
    for collected in ({name: each.collect for name, each in parts.items()}, read):
        labeled = CollectorRegistry()
        labeled.register(LabelingCollector("replica", collected))
        assert sample_values(labeled) == {
            f'{name.removesuffix("}") + "," if "{" in name else name + "{"}replica="{part}"}}': value
            for part, each in parts.items()
            for name, value in sample_values(each).items()
        }
        text = generate_latest(labeled).decode()
        assert text.count("# TYPE hits_total counter") == 1
    alone = CollectorRegistry()
    alone.register(LabelingCollector("", {"one": parts["one"].collect}))
    assert generate_latest(alone) == generate_latest(parts["one"])
