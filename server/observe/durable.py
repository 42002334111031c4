"""Metrics of what outlives the server: batches and streams."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Counted(Protocol):
    """What batches and streams count in this process, and what is kept."""

    @property
    def open_batches(self) -> int: ...

    @property
    def batch_requests(self) -> Mapping[str, int]: ...

    @property
    def resumed_streams(self) -> int: ...

    @property
    def kept(self) -> Mapping[str, int]:
        """Bytes in --data-dir, by kind."""


class DurableCollector(Collector):
    def __init__(self, counted: Counted, model_name: str) -> None:
        self._counted = counted
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        batches = GaugeMetricFamily("quire:batches", "Batches that have not ended.", labels=["model_name"])
        batches.add_metric([self._model_name], self._counted.open_batches)
        yield batches
        text = "Requests of batches that have their result, by what it is."
        requests = CounterMetricFamily("quire:batch_requests", text, labels=["model_name", "result"])
        for result, count in self._counted.batch_requests.items():
            requests.add_metric([self._model_name, result], count)
        yield requests
        text = "Answers that were asked for again, and went on."
        streams = CounterMetricFamily("quire:streams_resumed", text, labels=["model_name"])
        streams.add_metric([self._model_name], self._counted.resumed_streams)
        yield streams
        text = "Bytes of what is kept in --data-dir."
        kept = GaugeMetricFamily("quire:kept_bytes", text, labels=["model_name", "kind"])
        for kind, size in self._counted.kept.items():
            kept.add_metric([self._model_name, kind], size)
        yield kept
