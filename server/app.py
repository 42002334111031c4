"""The application: routes and the error table around the models that are served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from fastapi import APIRouter, FastAPI
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.engine import VERSION
from quire.engine.core.history import History
from quire.engine.link.client import EngineClient
from quire.engine.link.hub_link import HubLink
from quire.engine.lora.modules import Modules
from quire.server import errors
from quire.server.access.authentication import AuthenticationMiddleware
from quire.server.access.gateways import Gateways
from quire.server.access.held import HELD_BYTES, IMAGE_BYTES, HeldMiddleware
from quire.server.access.origins import with_cors
from quire.server.access.tenants import Tenants
from quire.server.budget import Budget
from quire.server.config import ServerConfig
from quire.server.durable import durable, go_on
from quire.server.generation.background import Background
from quire.server.observe.durable import DurableCollector
from quire.server.observe.logs import log_request
from quire.server.observe.opentelemetry import OpenTelemetrySpans, otlp_exporter
from quire.server.observe.request_log import RequestLogMiddleware, RequestRecord
from quire.server.peers import Peers, asking
from quire.server.protocol.adapters import LoadAdapterRequest, UnloadAdapterRequest
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.completions import CompletionRequest
from quire.server.protocol.messages import CountTokensRequest, MessagesRequest
from quire.server.protocol.ollama import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaPullRequest,
    OllamaShowRequest,
)
from quire.server.protocol.pooling import (
    ClassificationRequest,
    CohereEmbedRequest,
    ConversationEmbeddingRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from quire.server.protocol.questions.decisions import DecisionRequest
from quire.server.protocol.questions.label_scores import LabelScoreRequest
from quire.server.protocol.questions.systemone import SystemOneRequest
from quire.server.protocol.responses import ResponsesRequest
from quire.server.protocol.sessions import WarmRequest
from quire.server.protocol.stored.batches import BatchRequest
from quire.server.protocol.stored.conversations import ConversationRequest, ItemsRequest, MetadataRequest
from quire.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from quire.server.protocol.weights import CallRequest, UpdateWeightsRequest, WeightsGroupRequest
from quire.server.routes import (
    chat,
    completions,
    engine,
    invocations,
    llama_cpp,
    messages,
    models,
    page,
    requests,
    responses,
    sessions,
    status,
    tokenize,
)
from quire.server.routes.bodies import with_bodies
from quire.server.routes.ollama import endpoints as ollama
from quire.server.routes.ollama.pull import pull_router
from quire.server.routes.questions import decisions, systemone
from quire.server.routes.stored import batches as batch_routes
from quire.server.routes.stored import conversations, files, streams
from quire.server.routes.vectors import endpoints as vectors
from quire.server.runtime import Models, Runtime, Server, serving
from quire.server.served_model import ModelSource
from quire.server.store.data import Data, open_data
from quire.server.store.shared import shared_data


class OnlyModel:
    """The Models of a server of one."""

    def __init__(self, runtime: Runtime) -> None:
        self.loaded = (runtime,)

    async def give(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        scope["runtime"] = self.loaded[0]
        await app(scope, receive, send)


class ModelMiddleware:
    """The innermost ASGI middleware: each request gets its model."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        await scope["app"].state.server.models.give(self._app, scope, receive, send)


def create_app(client: EngineClient, source: ModelSource, modules: Modules | None = None) -> FastAPI:
    """An ASGI application that serves one model; its lifespan starts the client and stops it, and raises what `serving`
    raises. `modules`: see there. Raises what `application` raises."""
    config, tenants = source.config, Tenants(source.config)

    @asynccontextmanager
    async def opened() -> AsyncIterator[Models]:
        async with serving(source, modules, client, keyed=tenants.closed, folder=config.data_dir) as runtime:
            yield OnlyModel(runtime)

    held = HELD_BYTES + (0 if source.images is None else IMAGE_BYTES)
    link = client.link if isinstance(client.link, HubLink) else None
    return application(config, tenants, opened, held=held, link=link)


def _data(config: ServerConfig, folder: Path, link: HubLink | None) -> Data:
    """What is kept: of this process, or of the one that the link leads to. Raises ConfigError."""
    if link is not None:
        return shared_data(folder, asking(link))
    return open_data(folder, int(config.max_stored_size * 2**30))


def application(
    config: ServerConfig,
    tenants: Tenants,
    opened: Callable[[], AbstractAsyncContextManager[Models]],
    routers: Iterable[APIRouter] = (),
    *,
    held: int = HELD_BYTES + IMAGE_BYTES,
    link: HubLink | None = None,
) -> FastAPI:
    """An ASGI application of the models that are `opened` as long as its lifespan lasts. `routers`: routes that go
    before its own. Raises ConfigError for API keys and gateways that cannot be used; the lifespan what open_data and
    `opened` raise. `held`: bytes that all requests may hold. `link`: to the process that has what is kept, where others
    share it."""
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
            data = None
            if config.data_dir is not None:
                data = _data(config, config.data_dir, link)
                ending.callback(data.close)
            served = await ending.enter_async_context(opened())
            peers = Peers(link, None if data is None else data.calls)
            ending.push_async_callback((background := Background(peers)).close)
            parts, registry = None, CollectorRegistry()
            if data is not None:
                shared = durable(data, app, tenants, config, partial(_clients, served), peers)
                parts = await ending.enter_async_context(shared)
                registry.register(DurableCollector(parts, served.loaded[0].model.names[0]))
            app.state.server = Server(config, served, gateways, background, parts, registry)
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
    errors.install(app)
    for router in routers:
        app.include_router(router)
    _add_routes(app)
    _add_middleware(app, config, tenants, gateways, spans, held)
    return app


def _clients(models: Models) -> list[EngineClient]:
    return [each.client for each in models.loaded]


def _add_routes(app: FastAPI) -> None:
    generating = (completions, chat, messages, responses, conversations, decisions, systemone, vectors)
    others = (
        invocations,
        ollama,
        batch_routes,
        files,
        streams,
        models,
        tokenize,
        llama_cpp,
        sessions,
        requests,
        engine,
        status,
        page,
    )
    for module in (*generating, *others):
        app.include_router(module.router)
    app.include_router(pull_router())
    with_bodies(app, CompletionRequest, ChatRequest, MessagesRequest, CountTokensRequest, ResponsesRequest)
    with_bodies(app, ConversationRequest, MetadataRequest, ItemsRequest, DecisionRequest, SystemOneRequest)
    with_bodies(
        app,
        EmbeddingRequest,
        ConversationEmbeddingRequest,
        PoolingRequest,
        ClassificationRequest,
        ScoreRequest,
        RerankRequest,
    )
    with_bodies(app, CohereEmbedRequest, LabelScoreRequest, OllamaPullRequest, CallRequest)
    with_bodies(app, TokenizeRequest, DetokenizeRequest, UpdateWeightsRequest, WeightsGroupRequest)
    with_bodies(app, WarmRequest, LoadAdapterRequest, UnloadAdapterRequest, OllamaShowRequest, BatchRequest)
    with_bodies(app, OllamaChatRequest, OllamaGenerateRequest, OllamaEmbedRequest, OllamaEmbeddingsRequest)


def _add_middleware(
    app: FastAPI,
    config: ServerConfig,
    tenants: Tenants,
    gateways: Gateways,
    spans: OpenTelemetrySpans | None,
    held: int,
) -> None:
    """Add the middleware, the innermost first: a request meets the one added last first. `held`: bytes that all
    requests may hold."""
    ended: list[Callable[[RequestRecord], None]] = [] if config.disable_access_log else [log_request]
    if spans is not None:
        ended.append(spans.ended)
    app.add_middleware(ModelMiddleware)
    if config.data_dir is not None:
        app.add_middleware(streams.ResumptionMiddleware)
    app.add_middleware(HeldMiddleware, budget=Budget(held))
    app.add_middleware(AuthenticationMiddleware, tenants=tenants, gateways=gateways)
    app.add_middleware(errors.UnexpectedErrorMiddleware)
    app.add_middleware(with_cors, config)
    app.add_middleware(RequestLogMiddleware, ended=ended)
