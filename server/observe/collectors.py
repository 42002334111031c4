"""Metrics that are read off a server when somebody asks: what was refused, and which adapters are in use."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.engine.link.client import EngineClient


def by_label(
    model_name: str,
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Sequence[Mapping[str, float]],
) -> Metric:
    """`values`: for each engine, by that label."""
    family = kind(name, text, labels=["model_name", "engine", label])
    for engine, each in enumerate(values):
        for key, value in each.items():
            family.add_metric([model_name, str(engine), key], value)
    return family


class RefusalCollector(Collector):
    """Counts the calls that this process refused, and the answers that it gave up."""

    def __init__(self, client: EngineClient, model_name: str, rejections: Mapping[str, int]) -> None:
        self._client = client
        self._model_name = model_name
        self._rejections = rejections

    def collect(self) -> Iterable[Metric]:
        text = "Answers given up because nobody read them."
        counter = CounterMetricFamily("quire:slow_readers", text, labels=["model_name"])
        counter.add_metric([self._model_name], self._client.slow_readers)
        yield counter
        name, text = "vllm:admission_rejections", "Requests answered 503, by why."
        yield by_label(self._model_name, CounterMetricFamily, name, text, "reason", [self._rejections])


class AdapterCollector(Collector):
    """Names the adapters of the open requests, in the labels of a metric whose value is the time."""

    def __init__(self, client: EngineClient, max_loras: int) -> None:
        self._client = client
        self._max_loras = str(max_loras)

    def collect(self) -> Iterable[Metric]:
        labels = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]
        family = GaugeMetricFamily("vllm:lora_requests_info", "Adapters of the open requests.", labels=labels)
        waiting, running = (
            ",".join(sorted({adapter.name for adapter in adapters}))
            for adapters in (self._client.adapters(queued=True), self._client.adapters(queued=False))
        )
        family.add_metric([self._max_loras, waiting, running], time.time())
        yield family


def length_buckets(longest: int) -> list[int]:
    """1, 2, 5, 10, … up to the first that holds the longest."""
    buckets: list[int] = []
    while not buckets or buckets[-1] < longest:
        buckets.append((1, 2, 5)[len(buckets) % 3] * 10 ** (len(buckets) // 3))
    return buckets
