"""The application: routes and the error table around the models that are served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import chain

from fastapi import APIRouter, FastAPI
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.engine import VERSION
from quire.engine.core.request_history import RequestHistory
from quire.engine.link.client import EngineClient
from quire.engine.link.hub_link import HubLink
from quire.engine.lora.target_modules import ModuleShapes
from quire.engine.processes.child import Child
from quire.server import error_responses
from quire.server.access.allowed_hosts import AllowedHosts, AllowedHostsMiddleware
from quire.server.access.authentication import AuthenticationMiddleware
from quire.server.access.body_reader import BodyReader
from quire.server.access.cors import add_cors
from quire.server.access.gateway_headers import Gateways
from quire.server.access.memory_lease import MAX_LEASED_BYTES, MAX_LEASED_IMAGE_BYTES, MemoryLeaseMiddleware
from quire.server.access.root_path import RootPathMiddleware
from quire.server.access.tenants import Tenants
from quire.server.config import ServerConfig
from quire.server.generation.background import Background
from quire.server.observe.http_metrics import HttpMetrics
from quire.server.observe.log_setup import log_request
from quire.server.observe.metric_collectors import CallbackCollector, data_dir_metrics
from quire.server.observe.request_log import RequestLogMiddleware, RequestRecord
from quire.server.observe.request_spans import OpenTelemetrySpans, create_otlp_exporter
from quire.server.owner_budget import OwnerBudget
from quire.server.peers import PeerLink, Peers, RunFromThread, make_blocking_ask
from quire.server.persistence import open_persistence, recover_unfinished
from quire.server.routes import (
    endpoints,
    engine_admin,
    error_handlers,
    models,
    requests,
    responses,
    sessions,
    status,
    web_pages,
)
from quire.server.routes.bodies import describe_bodies
from quire.server.routes.ollama import model_info as ollama
from quire.server.routes.ollama import pull
from quire.server.routes.stored import batches, conversations, files, streams
from quire.server.runtime.model_runtime import ModelRuntime
from quire.server.runtime.model_startup import open_runtime
from quire.server.runtime.server_context import ModelDispatcher, ServerContext
from quire.server.served_model import ModelSource
from quire.server.store.data_dir import DataDir, open_data_dir
from quire.server.store.data_dir_rpc import remote_data_dir
from quire.server.store.database import SQLiteConnect
from quire.server.store.sweeper import SECONDS_PER_DAY
from quire.server.workers.pool import LaunchProcess

BODY_BUDGET_BYTES = 48 << 20
"""Memory for the bodies of requests that are received and resolved at the same time."""
ROUTERS = (
    *(endpoints.router, responses.generation_router, responses.counting_router, responses.router, conversations.router),
    *(
        ollama.router,
        pull.router,
        batches.router,
        files.router,
        streams.router,
        models.router,
        models.rate_limited_router,
    ),
    *(
        sessions.router,
        requests.router,
        engine_admin.router,
        engine_admin.sleep_router,
        status.router,
        web_pages.router,
    ),
)


class SingleModelDispatcher:
    """The Models of a server of one."""

    def __init__(self, runtime: ModelRuntime) -> None:
        self.loaded_runtimes = (runtime,)

    async def dispatch_request(
        self, handler: ASGIApp, scope: Scope, receive: Receive, send: Send, *, needs_awake: bool, names_model: bool
    ) -> None:
        scope["runtime"] = self.loaded_runtimes[0]
        await handler(scope, receive, send)


def create_app(
    client: EngineClient,
    source: ModelSource,
    modules: ModuleShapes | None = None,
    link: PeerLink | None = None,
    launch_process: LaunchProcess = Child,
) -> FastAPI:
    """An ASGI application that serves one model; its lifespan starts the client and stops it, and raises what
    `open_runtime` raises. `modules`, `launch_process`: see there; `link`: see `build_app`; of a client with a HubLink
    it is that one. Raises what `build_app` raises."""
    config, tenants = source.config, Tenants(source.config)

    @asynccontextmanager
    async def open_models() -> AsyncIterator[ModelDispatcher]:
        folder = config.data_dir
        async with open_runtime(
            source, modules, client, has_api_keys=tenants.requires_key, folder=folder, launch_process=launch_process
        ) as runtime:
            yield SingleModelDispatcher(runtime)

    budget_bytes = MAX_LEASED_BYTES + (0 if source.image_reader is None else MAX_LEASED_IMAGE_BYTES)
    data_link = client.link if isinstance(client.link, HubLink) else link
    return build_app(config, tenants, open_models, budget_bytes=budget_bytes, link=data_link)


def open_configured_data_dir(
    config: ServerConfig,
    link: PeerLink | None,
    *,
    connect: SQLiteConnect | None = None,
    from_thread: RunFromThread = asyncio.run_coroutine_threadsafe,
) -> DataDir | None:
    """What is kept: of this process, or of the one that the link leads to; None without data_dir. `connect`: see
    Database; `from_thread`: see `make_blocking_ask`. Raises ConfigError."""
    if config.data_dir is None:
        return None
    if link is not None:
        return remote_data_dir(config.data_dir, make_blocking_ask(link, from_thread))
    retention = config.response_retention_days * SECONDS_PER_DAY
    return open_data_dir(
        config.data_dir, int(config.max_stored_size * 2**30), retention_seconds=retention, connect=connect
    )


def build_app(
    config: ServerConfig,
    tenants: Tenants,
    open_models: Callable[[], AbstractAsyncContextManager[ModelDispatcher]],
    routers: Sequence[APIRouter] = (),
    *,
    budget_bytes: int = MAX_LEASED_BYTES + MAX_LEASED_IMAGE_BYTES,
    link: PeerLink | None = None,
    open_stored_data: Callable[[ServerConfig, PeerLink | None], DataDir | None] = open_configured_data_dir,
) -> FastAPI:
    """An ASGI application of the models that are `open_models` as long as its lifespan lasts. `routers`: routes that go
    before its own. Raises ConfigError for API keys, gateways and hosts that cannot be used; the lifespan what
    `open_models` and `open_stored_data` raise. `budget_bytes`: bytes that all requests may hold. `link`: to the process
    that has what is kept, where others share it. `open_stored_data`: gives what is kept."""
    gateways = Gateways(config)

    def histories() -> list[RequestHistory]:
        return [each.client.history for each in app.state.server.models.loaded_runtimes]

    endpoint = config.otlp_traces_endpoint
    span_exporter = None if endpoint is None else OpenTelemetrySpans(create_otlp_exporter(endpoint), histories)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as exit_stack:  # the last one that began ends first
            if span_exporter is not None:
                exit_stack.push_async_callback(asyncio.to_thread, span_exporter.flush_and_close)
            if (data := open_stored_data(config, link)) is not None:
                exit_stack.callback(data.close)
            models = await exit_stack.enter_async_context(open_models())
            peers = Peers(link, None if data is None else data.calls)
            exit_stack.push_async_callback((background := Background(peers)).close)
            persistence, registry = None, CollectorRegistry()
            if data is not None:
                persistence_context = open_persistence(
                    data, app, tenants, config, partial(_engine_clients, models), peers
                )
                persistence = await exit_stack.enter_async_context(persistence_context)
                name, results = models.loaded_runtimes[0].model.names[0], persistence.batch_runner.result_counts
                registry.register(
                    CallbackCollector(
                        partial(data_dir_metrics, partial(getattr, persistence, "data_dir_status"), results, name)
                    )
                )
            bodies = BodyReader(int(config.max_body_size * 2**20), BODY_BUDGET_BYTES)
            app.state.server = ServerContext(config, models, gateways, background, persistence, registry, http, bodies)
            for each in models.loaded_runtimes:
                each.cross_process_observer.http_metrics = http
            if persistence is not None:
                exit_stack.callback(asyncio.create_task(recover_unfinished(persistence, app, tenants)).cancel)
            yield

    app = FastAPI(
        title="Quire",
        version=VERSION,
        lifespan=lifespan,
        redirect_slashes=False,
        strict_content_type=False,
        docs_url=None,  # server/routes/web_pages.py has it; FastAPI's own pages load what they show from elsewhere
        redoc_url=None,
    )
    error_handlers.install_error_handlers(app)
    http = _add_routes(app, (*routers, *ROUTERS))
    _add_middleware(app, config, tenants, gateways, span_exporter, budget_bytes, http)
    return app


def _add_routes(app: FastAPI, routers: Sequence[APIRouter]) -> HttpMetrics:
    """Add the routes; returns what counts their requests."""
    for router in routers:
        app.include_router(router)
    describe_bodies(app, ROUTERS)
    return HttpMetrics([*chain.from_iterable(router.routes for router in routers), *app.routes])


def _engine_clients(models: ModelDispatcher) -> list[EngineClient]:
    return [each.client for each in models.loaded_runtimes]


def _add_middleware(
    app: FastAPI,
    config: ServerConfig,
    tenants: Tenants,
    gateways: Gateways,
    span_exporter: OpenTelemetrySpans | None,
    budget_bytes: int,
    http: HttpMetrics,
) -> None:
    """Add the middleware, the innermost first: a request meets the one added last first. `budget_bytes`: bytes that all
    requests may hold. Raises ConfigError for allowed hosts that cannot be used."""
    app.state.hosts = AllowedHosts(config)
    record_sinks: list[Callable[[RequestRecord], None]] = [] if config.disable_access_log else [log_request]
    if span_exporter is not None:
        record_sinks.append(span_exporter.export_request)
    if config.data_dir is not None:
        app.add_middleware(streams.ResumptionMiddleware)
    app.add_middleware(MemoryLeaseMiddleware, budget=OwnerBudget(budget_bytes))
    app.add_middleware(AuthenticationMiddleware, tenants=tenants, gateways=gateways)
    app.add_middleware(error_responses.UnexpectedErrorMiddleware)
    app.add_middleware(add_cors, config)
    app.add_middleware(AllowedHostsMiddleware, hosts=app.state.hosts)
    app.add_middleware(RequestLogMiddleware, end_listeners=record_sinks, counter=http)
    if config.root_path.strip("/"):
        app.add_middleware(RootPathMiddleware, prefix=config.root_path)
