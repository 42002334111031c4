from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_CREATED_SUFFIX = "_created"


class PeerSample(msgspec.Struct, frozen=True, array_like=True):
    metric: str
    name: str
    labels: dict[str, str]
    value: float


decode_samples = msgspec.msgpack.Decoder(list[PeerSample]).decode


def samples_of_registry(registry: CollectorRegistry) -> list[PeerSample]:
    return [
        PeerSample(metric.name, sample.name, sample.labels, sample.value)
        for metric in registry.collect()
        for sample in metric.samples
        if not sample.name.endswith(_CREATED_SUFFIX)
    ]


class LabelingCollector(Collector):
    def __init__(self, label: str, collectors: Mapping[str, Callable[[], Iterable[Metric]]]) -> None:
        """If `label` is "", no label is added."""
        self._label, self._collectors = label, collectors

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for name, collect in self._collectors.items():
            added_labels = {self._label: name} if self._label else {}
            for metric in collect():
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                family.samples += [each._replace(labels=added_labels | each.labels) for each in metric.samples]
        return families.values()


class SummingCollector(Collector):
    def __init__(self, local_collector: Collector, peer_samples: Iterable[PeerSample]) -> None:
        self._local_collector = local_collector
        self._peer_values: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], float]] = defaultdict(dict)
        for each in peer_samples:
            metric_values, key = self._peer_values[each.metric], (each.name, frozenset(each.labels.items()))
            metric_values[key] = metric_values.get(key, 0.0) + each.value

    def collect(self) -> Iterator[Metric]:
        for metric in self._local_collector.collect():
            peer_values = dict(self._peer_values.get(metric.name, {}))
            summed = Metric(metric.name, metric.documentation, metric.type)
            summed.samples = [_add_peer_value(each, peer_values) for each in metric.samples]
            summed.samples += [Sample(name, dict(labels), value) for (name, labels), value in peer_values.items()]
            yield summed


def _add_peer_value(sample: Sample, peer_values: dict[tuple[str, frozenset[tuple[str, str]]], float]) -> Sample:
    peer_value = peer_values.pop((sample.name, frozenset(sample.labels.items())), 0.0)
    return sample._replace(value=sample.value + peer_value) if peer_value else sample
