from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI

from quire.server.access.allowed_hosts import AllowedHosts, AllowedHostsMiddleware
from quire.server.access.authentication import AuthenticationMiddleware
from quire.server.access.cors import wrap_in_cors
from quire.server.access.gateway_headers import TrustedGateways
from quire.server.access.memory_lease import MemoryLeaseMiddleware
from quire.server.access.root_path import RootPathMiddleware
from quire.server.access.tenants import Tenants
from quire.server.access.unexpected_errors import UnexpectedErrorMiddleware
from quire.server.config import ServerConfig
from quire.server.durability.replayed_request import ResumptionMiddleware
from quire.server.observe.http_metrics import HttpMetrics
from quire.server.observe.request_log import RequestLogMiddleware, RequestRecord, log_request
from quire.server.observe.request_spans import RequestSpanExporter
from quire.server.shared_capacity import SharedCapacity


def add_middleware(
    app: FastAPI,
    config: ServerConfig,
    tenants: Tenants,
    gateways: TrustedGateways,
    span_exporter: RequestSpanExporter | None,
    budget_bytes: int,
    http_metrics: HttpMetrics,
) -> None:
    """Adds middleware from the inside out: the middleware that is added last sees requests first. `budget_bytes` bounds
    the memory that all requests and their unread answers may lease together. Raises ConfigError if
    `config.allowed_hosts` has an invalid name.
    """
    app.state.hosts = AllowedHosts(config)
    record_sinks: list[Callable[[RequestRecord], None]] = []
    if not config.disable_access_log:
        record_sinks.append(log_request)
    if span_exporter is not None:
        record_sinks.append(span_exporter.export_request)
    if config.data_dir is not None:
        app.add_middleware(ResumptionMiddleware)
    app.add_middleware(MemoryLeaseMiddleware, budget=SharedCapacity(budget_bytes))
    app.add_middleware(AuthenticationMiddleware, tenants=tenants, gateways=gateways)
    app.add_middleware(UnexpectedErrorMiddleware)
    app.add_middleware(wrap_in_cors, config)
    app.add_middleware(AllowedHostsMiddleware, hosts=app.state.hosts)
    app.add_middleware(RequestLogMiddleware, end_listeners=record_sinks, counter=http_metrics)
    if config.root_path.strip("/"):
        app.add_middleware(RootPathMiddleware, prefix=config.root_path)
