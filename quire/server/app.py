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
from quire.engine.core.history import History
from quire.engine.link.client import EngineClient
from quire.engine.link.hub_link import HubLink
from quire.engine.lora.modules import Modules
from quire.engine.processes.child import Child
from quire.server import errors
from quire.server.access.authentication import AuthenticationMiddleware
from quire.server.access.bodies import Bodies
from quire.server.access.gateways import Gateways
from quire.server.access.held import HELD_BYTES, IMAGE_BYTES, HeldMiddleware
from quire.server.access.hosts import HostMiddleware, Hosts
from quire.server.access.origins import with_cors
from quire.server.access.prefix import PrefixMiddleware
from quire.server.access.tenants import Tenants
from quire.server.budget import Budget
from quire.server.config import ServerConfig
from quire.server.durable import durable, go_on
from quire.server.generation.background import Background
from quire.server.observe.collectors import ReadCollector, kept_metrics
from quire.server.observe.http_metrics import HttpMetrics
from quire.server.observe.logs import log_request
from quire.server.observe.opentelemetry import OpenTelemetrySpans, otlp_exporter
from quire.server.observe.request_log import RequestLogMiddleware, RequestRecord
from quire.server.peers import FromThread, Link, Peers, asking
from quire.server.routes import (
    endpoints,
    engine,
    failures,
    models,
    page,
    requests,
    responses,
    sessions,
    status,
)
from quire.server.routes.bodies import describe_bodies
from quire.server.routes.ollama import endpoints as ollama
from quire.server.routes.ollama import pull
from quire.server.routes.stored import batches, conversations, files, streams
from quire.server.runtime import Models, Runtime, Server, serving
from quire.server.served_model import ModelSource
from quire.server.store.data import Data, open_data
from quire.server.store.database import Connect
from quire.server.store.shared import shared_data
from quire.server.store.sweeper import DAY
from quire.server.workers.pool import LaunchWorkers

BODIES_BYTES = 48 << 20
"""Memory for the bodies of requests that are received and resolved at the same time."""
ROUTERS = (
    *(endpoints.router, responses.creating, responses.counting, responses.router, conversations.router),
    *(ollama.router, pull.router, batches.router, files.router, streams.router, models.router, models.counted),
    *(sessions.router, requests.router, engine.router, engine.asleep, status.router, page.router),
)


class OnlyModel:
    """The Models of a server of one."""

    def __init__(self, runtime: Runtime) -> None:
        self.loaded = (runtime,)

    async def give(
        self, answer: ASGIApp, scope: Scope, receive: Receive, send: Send, *, awake: bool, named: bool
    ) -> None:
        scope["runtime"] = self.loaded[0]
        await answer(scope, receive, send)


def create_app(
    client: EngineClient,
    source: ModelSource,
    modules: Modules | None = None,
    link: Link | None = None,
    launch: LaunchWorkers = Child,
) -> FastAPI:
    """An ASGI application that serves one model; its lifespan starts the client and stops it, and raises what `serving`
    raises. `modules`, `launch`: see there; `link`: see `application`; of a client with a HubLink it is that one.
    Raises what `application` raises."""
    config, tenants = source.config, Tenants(source.config)

    @asynccontextmanager
    async def opened() -> AsyncIterator[Models]:
        folder = config.data_dir
        async with serving(source, modules, client, keyed=tenants.closed, folder=folder, launch=launch) as runtime:
            yield OnlyModel(runtime)

    held = HELD_BYTES + (0 if source.images is None else IMAGE_BYTES)
    shared = client.link if isinstance(client.link, HubLink) else link
    return application(config, tenants, opened, held=held, link=shared)


def kept_data(
    config: ServerConfig,
    link: Link | None,
    *,
    connect: Connect | None = None,
    from_thread: FromThread = asyncio.run_coroutine_threadsafe,
) -> Data | None:
    """What is kept: of this process, or of the one that the link leads to; None without data_dir. `connect`: see
    Database; `from_thread`: see `asking`. Raises ConfigError."""
    if config.data_dir is None:
        return None
    if link is not None:
        return shared_data(config.data_dir, asking(link, from_thread))
    retention = config.response_retention_days * DAY
    return open_data(config.data_dir, int(config.max_stored_size * 2**30), retention=retention, connect=connect)


def application(
    config: ServerConfig,
    tenants: Tenants,
    opened: Callable[[], AbstractAsyncContextManager[Models]],
    routers: Sequence[APIRouter] = (),
    *,
    held: int = HELD_BYTES + IMAGE_BYTES,
    link: Link | None = None,
    open_kept: Callable[[ServerConfig, Link | None], Data | None] = kept_data,
) -> FastAPI:
    """An ASGI application of the models that are `opened` as long as its lifespan lasts. `routers`: routes that go
    before its own. Raises ConfigError for API keys, gateways and hosts that cannot be used; the lifespan what
    `opened` and `open_kept` raise. `held`: bytes that all requests may hold. `link`: to the process that has what is
    kept, where others share it. `open_kept`: gives what is kept."""
    gateways = Gateways(config)

    def histories() -> list[History]:
        return [each.client.history for each in app.state.server.models.loaded]

    endpoint = config.otlp_traces_endpoint
    spans = None if endpoint is None else OpenTelemetrySpans(otlp_exporter(endpoint), histories)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as ending:  # the last one that began ends first
            if spans is not None:
                ending.push_async_callback(asyncio.to_thread, spans.close)
            if (data := open_kept(config, link)) is not None:
                ending.callback(data.close)
            served = await ending.enter_async_context(opened())
            peers = Peers(link, None if data is None else data.calls)
            ending.push_async_callback((background := Background(peers)).close)
            parts, registry = None, CollectorRegistry()
            if data is not None:
                shared = durable(data, app, tenants, config, partial(_clients, served), peers)
                parts = await ending.enter_async_context(shared)
                name, results = served.loaded[0].model.names[0], parts.batches.results
                registry.register(ReadCollector(partial(kept_metrics, partial(getattr, parts, "seen"), results, name)))
            bodies = Bodies(int(config.max_body_size * 2**20), BODIES_BYTES)
            app.state.server = Server(config, served, gateways, background, parts, registry, http, bodies)
            for each in served.loaded:
                each.others.http = http
            if parts is not None:
                ending.callback(asyncio.create_task(go_on(parts, app, tenants)).cancel)
            yield

    app = FastAPI(
        title="Quire",
        version=VERSION,
        lifespan=lifespan,
        redirect_slashes=False,
        strict_content_type=False,
        docs_url=None,  # server/routes/page.py has it; FastAPI's own pages load what they show from elsewhere
        redoc_url=None,
    )
    failures.install(app)
    http = _add_routes(app, (*routers, *ROUTERS))
    _add_middleware(app, config, tenants, gateways, spans, held, http)
    return app


def _add_routes(app: FastAPI, routers: Sequence[APIRouter]) -> HttpMetrics:
    """Add the routes; returns what counts their requests."""
    for router in routers:
        app.include_router(router)
    describe_bodies(app, ROUTERS)
    return HttpMetrics([*chain.from_iterable(router.routes for router in routers), *app.routes])


def _clients(models: Models) -> list[EngineClient]:
    return [each.client for each in models.loaded]


def _add_middleware(
    app: FastAPI,
    config: ServerConfig,
    tenants: Tenants,
    gateways: Gateways,
    spans: OpenTelemetrySpans | None,
    held: int,
    http: HttpMetrics,
) -> None:
    """Add the middleware, the innermost first: a request meets the one added last first. `held`: bytes that all
    requests may hold. Raises ConfigError for allowed hosts that cannot be used."""
    app.state.hosts = Hosts(config)
    ended: list[Callable[[RequestRecord], None]] = [] if config.disable_access_log else [log_request]
    if spans is not None:
        ended.append(spans.ended)
    if config.data_dir is not None:
        app.add_middleware(streams.ResumptionMiddleware)
    app.add_middleware(HeldMiddleware, budget=Budget(held))
    app.add_middleware(AuthenticationMiddleware, tenants=tenants, gateways=gateways)
    app.add_middleware(errors.UnexpectedErrorMiddleware)
    app.add_middleware(with_cors, config)
    app.add_middleware(HostMiddleware, hosts=app.state.hosts)
    app.add_middleware(RequestLogMiddleware, ended=ended, http=http)
    if config.root_path.strip("/"):
        app.add_middleware(PrefixMiddleware, prefix=config.root_path)
