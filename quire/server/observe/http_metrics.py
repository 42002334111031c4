"""HTTP and process metrics that vLLM's dashboards use, named as in
https://github.com/trallnag/prometheus-fastapi-instrumentator and prometheus_client's ProcessCollector.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, Summary
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from quire.server.observe.metric_sums import PeerSample, SummingCollector, samples_of_registry
from quire.server.observe.request_log import RequestRecord

UNCOUNTED_PATHS = frozenset(("/metrics", "/health", "/live", "/ready", "/ping", "/load", "/version"))
"""Probes of these paths would outnumber all other requests."""
_UNKNOWN_PATH, _UNKNOWN_METHOD = "none", "UNKNOWN"
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"))
_COARSE_BUCKETS = (0.1, 0.5, 1.0)
_FINE_BUCKETS = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
    2.5,
    3.0,
    3.5,
    4.0,
    4.5,
    5.0,
    7.5,
    10.0,
    30.0,
    60.0,
)
_IN_FLIGHT_METRIC = "http_requests_inprogress"
_WEBSOCKETS_METRIC = "quire:websocket_connections"
_START_TIME_METRIC = "process_start_time_seconds"
_OWN_GAUGES = (_IN_FLIGHT_METRIC, _WEBSOCKETS_METRIC, _START_TIME_METRIC)
_IN_PROCESS_SERVER = ("batch", None)
"""The scope's `server` in requests that the server makes itself."""


class HttpMetrics(Collector):
    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self._routes = routes
        self._registry = CollectorRegistry()
        registry = self._registry
        by_handler = ("handler",)
        self._num_requests = Counter(
            "http_requests", "HTTP requests that have ended.", ("method", "status", "handler"), registry=registry
        )
        self._received_bytes = Summary("http_request_size_bytes", "Bytes of bodies.", by_handler, registry=registry)
        self._sent_bytes = Summary("http_response_size_bytes", "Bytes of answers.", by_handler, registry=registry)
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Seconds from a request's head to the end of its answer.",
            ("method", "handler"),
            buckets=_COARSE_BUCKETS,
            registry=registry,
        )
        self._all_seconds = Histogram(
            "http_request_duration_highr_seconds",
            "The same for all routes together, with more buckets.",
            buckets=_FINE_BUCKETS,
            registry=registry,
        )
        self._open_requests = Gauge(_IN_FLIGHT_METRIC, "HTTP requests in progress.", registry=registry)
        self.open_websockets = Gauge(_WEBSOCKETS_METRIC, "Open WebSockets.", registry=registry)
        ProcessCollector(registry=registry)

    def collect(self) -> Iterable[Metric]:
        return self._registry.collect()

    def count_request_start_if_tracked(self, scope: Scope) -> bool:
        """After True, count_request_end must be called."""
        if scope["path"] in UNCOUNTED_PATHS or scope.get("server") == _IN_PROCESS_SERVER:
            return False
        self._open_requests.inc()
        return True

    def count_request_end(self, record: RequestRecord, scope: Scope, received_bytes: int, sent_bytes: int) -> None:
        """Bytes are those of Content-Length headers, or 0."""
        self._open_requests.dec()
        handler, seconds = self._route_template(scope), (record.ended_at or record.arrived_at) - record.arrived_at
        method = record.method if record.method in _METHODS else _UNKNOWN_METHOD
        status = 500 if record.status is None else record.status
        self._num_requests.labels(method, f"{status // 100}xx", handler).inc()
        self._received_bytes.labels(handler).observe(received_bytes)
        self._sent_bytes.labels(handler).observe(sent_bytes)
        self._seconds.labels(method, handler).observe(seconds)
        self._all_seconds.observe(seconds)

    def collect_samples(self) -> list[PeerSample]:
        return samples_of_registry(self._registry)

    def _route_template(self, scope: Scope) -> str:
        route = scope.get("route")
        if route is None:  # refused before routing, or answered by a mounted application
            unprefixed_scope = {**scope, "root_path": ""}
            route = next((each for each in self._routes if each.matches(unprefixed_scope)[0] is not Match.NONE), None)
        return str(getattr(route, "path", _UNKNOWN_PATH))


def without_process_gauges(inherited: Sequence[PeerSample]) -> list[PeerSample]:
    process_gauges = (
        "process_virtual_memory_bytes",
        "process_resident_memory_bytes",
        "process_open_fds",
        "process_max_fds",
    )
    return [each for each in inherited if each.metric not in (*process_gauges, *_OWN_GAUGES)]


class MergedHttpMetrics(Collector):
    """The start time is that of the process that started first."""

    def __init__(self, local_metrics: HttpMetrics, peer_samples: Sequence[PeerSample]) -> None:
        self._summed = SummingCollector(
            local_metrics, [each for each in peer_samples if each.metric != _START_TIME_METRIC]
        )
        self._start_times = [each.value for each in peer_samples if each.metric == _START_TIME_METRIC]

    def collect(self) -> Iterator[Metric]:
        for metric in self._summed.collect():
            if metric.name == _START_TIME_METRIC:
                metric.samples = [
                    each._replace(value=min(each.value, *self._start_times, each.value)) for each in metric.samples
                ]
            yield metric
