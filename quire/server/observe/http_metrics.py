"""Metrics of HTTP requests and of the process, by the names that dashboards for vLLM ask for: those of
prometheus-fastapi-instrumentator (https://github.com/trallnag/prometheus-fastapi-instrumentator) and of
prometheus_client's ProcessCollector."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, Summary
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from quire.server.observe.request_log import RequestRecord
from quire.server.observe.summed import Count, Summed, counts

UNCOUNTED = frozenset(("/metrics", "/health", "/live", "/ready", "/ping", "/load", "/version"))
"""Routes of probes, which would hide all else."""
_UNKNOWN_PATH, _UNKNOWN_METHOD = "none", "UNKNOWN"
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"))
_FEW_SECONDS = (0.1, 0.5, 1.0)
_MANY_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5),
    *(10.0, 30.0, 60.0),
)
_IN_FLIGHT = "http_requests_inprogress"
_STARTED = "process_start_time_seconds"
_OWN_CALLS = ("batch", None)
"""The `server` of scopes of requests that the server makes to itself: no HTTP requests."""


class HttpMetrics(Collector):
    """What this process counts of HTTP requests, and what it is."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        """`routes`: those of the application; their templates are the values of the label `handler`."""
        self._routes = routes
        self._registry = CollectorRegistry()
        registry = self._registry
        by_handler = ("handler",)
        self._total = Counter(
            "http_requests", "HTTP requests that have ended.", ("method", "status", "handler"), registry=registry
        )
        self._received = Summary("http_request_size_bytes", "Bytes of bodies.", by_handler, registry=registry)
        self._sent = Summary("http_response_size_bytes", "Bytes of answers.", by_handler, registry=registry)
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Seconds from a request's head to the end of its answer.",
            ("method", "handler"),
            buckets=_FEW_SECONDS,
            registry=registry,
        )
        self._all_seconds = Histogram(
            "http_request_duration_highr_seconds",
            "The same of all routes together, in more buckets.",
            buckets=_MANY_SECONDS,
            registry=registry,
        )
        self._open = Gauge(_IN_FLIGHT, "HTTP requests that are being answered.", registry=registry)
        ProcessCollector(registry=registry)

    def collect(self) -> Iterable[Metric]:
        return self._registry.collect()

    def begin(self, scope: Scope) -> bool:
        """Whether a request counts; one that does is to be ended too."""
        if scope["path"] in UNCOUNTED or scope.get("server") == _OWN_CALLS:
            return False
        self._open.inc()
        return True

    def end(self, record: RequestRecord, scope: Scope, received: int, sent: int) -> None:
        """Count a request whose answer is complete, or has failed. `received`, `sent`: the lengths that its head and
        the answer's say; 0 where they say none."""
        self._open.dec()
        handler, seconds = self._handler(scope), (record.ended or record.arrived) - record.arrived
        method = record.method if record.method in _METHODS else _UNKNOWN_METHOD
        status = 500 if record.status is None else record.status
        self._total.labels(method, f"{status // 100}xx", handler).inc()
        self._received.labels(handler).observe(received)
        self._sent.labels(handler).observe(sent)
        self._seconds.labels(method, handler).observe(seconds)
        self._all_seconds.observe(seconds)

    def counts(self) -> list[Count]:
        """What the other processes add to their own."""
        return counts(self._registry)

    def _handler(self, scope: Scope) -> str:
        """The template of the request's route; paths that nobody knows have one name together."""
        route = scope.get("route")
        if route is None:  # it was refused before it was routed, or a mounted application answered it
            whole = {**scope, "root_path": ""}
            route = next((each for each in self._routes if each.matches(whole)[0] is not Match.NONE), None)
        return str(getattr(route, "path", _UNKNOWN_PATH))


def lasting(inherited: Sequence[Count]) -> list[Count]:
    """What is left of processes that have ended: what they counted, not what they had."""
    had = ("process_virtual_memory_bytes", "process_resident_memory_bytes", "process_open_fds", "process_max_fds")
    return [each for each in inherited if each.metric not in (*had, _IN_FLIGHT, _STARTED)]


class HttpOfAll(Collector):
    """HttpMetrics with those of the other processes. The start is the earliest of all."""

    def __init__(self, own: HttpMetrics, others: Sequence[Count]) -> None:
        self._summed = Summed(own, [each for each in others if each.metric != _STARTED])
        self._starts = [each.value for each in others if each.metric == _STARTED]

    def collect(self) -> Iterator[Metric]:
        for metric in self._summed.collect():
            if metric.name == _STARTED:
                metric.samples = [
                    each._replace(value=min(each.value, *self._starts, each.value)) for each in metric.samples
                ]
            yield metric
