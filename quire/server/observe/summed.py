"""The sum of metrics that several processes count, each for itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_BEGAN = "_created"
"""The end of names of samples that tell when a count began."""


class Count(msgspec.Struct, frozen=True, array_like=True):
    """A sample of another process."""

    metric: str
    name: str
    labels: dict[str, str]
    value: float


decode = msgspec.msgpack.Decoder(list[Count]).decode


def counts(registry: CollectorRegistry) -> list[Count]:
    """All samples of a registry that has counters and histograms alone."""
    return [
        Count(metric.name, sample.name, sample.labels, sample.value)
        for metric in registry.collect()
        for sample in metric.samples
        if not sample.name.endswith(_BEGAN)
    ]


class Together(Collector):
    """The metrics of several models or processes, by their names: all samples of a metric together, with the name in a
    label of theirs."""

    def __init__(self, label: str, parts: Mapping[str, Callable[[], Iterable[Metric]]]) -> None:
        """`label`: "" where none is needed. `parts`: what collects each one's."""
        self._label, self._parts = label, parts

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for name, collect in self._parts.items():
            more = {self._label: name} if self._label else {}
            for metric in collect():
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                family.samples += [each._replace(labels=more | each.labels) for each in metric.samples]
        return families.values()


class Summed(Collector):
    """A collector's metrics, with what other processes count of them."""

    def __init__(self, registry: Collector, others: Iterable[Count]) -> None:
        self._registry = registry
        self._others: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], float]] = defaultdict(dict)
        for each in others:
            of_metric, key = self._others[each.metric], (each.name, frozenset(each.labels.items()))
            of_metric[key] = of_metric.get(key, 0.0) + each.value

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            others = dict(self._others.get(metric.name, {}))
            summed = Metric(metric.name, metric.documentation, metric.type)
            summed.samples = [_plus(each, others) for each in metric.samples]
            summed.samples += [Sample(name, dict(labels), value) for (name, labels), value in others.items()]
            yield summed


def _plus(sample: Sample, others: dict[tuple[str, frozenset[tuple[str, str]]], float]) -> Sample:
    """The sample with others' values, which are taken out of `others`."""
    more = others.pop((sample.name, frozenset(sample.labels.items())), 0.0)
    return sample._replace(value=sample.value + more) if more else sample
