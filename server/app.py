"""The application: routes and the error table around one engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from quire.engine import VERSION
from quire.engine.checkpoint.pooling import Pooling
from quire.engine.client.broadcast import WeightsGroup
from quire.engine.client.client import EngineClient
from quire.engine.client.weights import Weights
from quire.engine.hub.remote import HubLink, NoWeightsGroup
from quire.engine.images.reader import ImageReader
from quire.engine.lora.modules import Modules
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import TEXT_ALONE, EngineInfo
from quire.server import errors
from quire.server.access.admission import Admission
from quire.server.access.authentication import AuthenticationMiddleware
from quire.server.access.bodies import Bodies
from quire.server.access.gateways import Gateways
from quire.server.access.held import HELD_BYTES, IMAGE_BYTES, HeldMiddleware
from quire.server.access.tenants import Tenants
from quire.server.adapters import Adapters, adapters_of
from quire.server.budget import Budget
from quire.server.config import ServerConfig
from quire.server.durable import Durable, durable, go_on
from quire.server.generation.background import Background
from quire.server.generation.fold import Kept
from quire.server.generation.turns import Turns
from quire.server.observe.live_view import LiveView
from quire.server.observe.logs import log_request
from quire.server.observe.metrics import Metrics
from quire.server.observe.opentelemetry import OpenTelemetrySpans, otlp_exporter
from quire.server.observe.others import Others
from quire.server.observe.request_log import RequestLog, RequestLogMiddleware, RequestRecord
from quire.server.observe.throughput import tell_throughput
from quire.server.protocol.adapters import LoadAdapterRequest, UnloadAdapterRequest
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.completions import CompletionRequest
from quire.server.protocol.decisions import DecisionRequest
from quire.server.protocol.messages import CountTokensRequest, MessagesRequest
from quire.server.protocol.ollama import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from quire.server.protocol.pooling import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from quire.server.protocol.responses import ResponsesRequest
from quire.server.protocol.stored.batches import BatchRequest
from quire.server.protocol.stored.conversations import ConversationRequest, ItemsRequest, MetadataRequest
from quire.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from quire.server.protocol.weights import UpdateWeightsRequest, WeightsGroupRequest
from quire.server.routes import (
    chat,
    completions,
    decisions,
    engine,
    invocations,
    messages,
    models,
    page,
    requests,
    responses,
    status,
    tokenize,
)
from quire.server.routes.bodies import with_bodies
from quire.server.routes.ollama import endpoints as ollama
from quire.server.routes.stored import batches as batch_routes
from quire.server.routes.stored import conversations, files, streams
from quire.server.routes.vectors import endpoints as vectors
from quire.server.runtime import Runtime
from quire.server.served_model import ModelSource, ServedModel, fingerprint
from quire.server.store.data import Data, open_data
from quire.server.workers.grammars import GrammarChecker
from quire.server.workers.pool import WorkerPool

BODIES_BYTES = 48 << 20
"""Memory for the bodies of requests that are received and resolved at the same time."""


def create_app(
    config: ServerConfig,
    client: EngineClient,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    generation_defaults: Mapping[str, float],
    pooling: Pooling | None = None,
    images: ImageReader | None = None,
    modules: Modules | None = None,
    tenants: Tenants | None = None,
) -> FastAPI:
    """An ASGI application that serves one model; its lifespan starts the client and stops it.

    The model's token ids run from 0 to vocab_size - 1. generation_defaults: the sampling parameters of
    generation_config.json; pooling: how the model makes vectors; images: how it reads them; modules: those that may
    have adapters; tenants: where other apps serve them too, whose limits count for all together. Raises ConfigError for
    API keys and gateways that cannot be used; the lifespan what client.link.start(), open_store and adapters_of raise.
    """
    tenants, gateways = tenants or Tenants(config), Gateways(config)
    client.history.keep = config.request_history
    spans = open_spans(config, client)
    source = ModelSource(config, tokenizer, vocab_size, generation_defaults, pooling=pooling, images=images)
    unstarted = source.model()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as ending:  # the last one that began ends first
            if spans is not None:
                ending.push_async_callback(asyncio.to_thread, spans.close)
            group = weights_group(app, client)
            ending.push_async_callback(group.close)
            ending.push_async_callback(client.link.stop)
            data = open_kept(config)
            if data is not None:
                ending.callback(data.close)
            info = await client.link.start()
            served = ending.enter_context(adapters_of(config, modules, lambda: in_use(client), device=info.device))
            app.state.model = model = _started(unstarted, info, client.link.weights_version, served)
            ending.push_async_callback((workers := WorkerPool(source.started(model), model.adapters)).close)
            ending.callback((turns := Turns()).close)
            ending.push_async_callback((background := Background()).close)
            parts = None
            if data is not None:
                parts = await ending.enter_async_context(
                    durable(data, app, tenants, config, lambda: client.queued_tokens)
                )
            app.state.admission = admission = Admission(client, config, info.max_model_len, keyed=tenants.closed)
            app.state.runtime = _runtime(
                config, info, model, admission, client, group, workers, turns, background, gateways, served, parts
            )
            if parts is not None:
                ending.callback(asyncio.create_task(go_on(parts, app, tenants)).cancel)
            if not (config.disable_log_stats or isinstance(client.link, HubLink)):
                ending.callback(asyncio.create_task(tell_throughput(client)).cancel)
            yield

    app = _application(lifespan)
    _add_middleware(app, config, tenants, gateways, spans, HELD_BYTES + (IMAGE_BYTES if images else 0))
    return app


def _application(lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
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
    _add_routes(app)
    return app


def _started(model: ServedModel, info: EngineInfo, version: str, adapters: Adapters | None) -> ServedModel:
    """The model with what its engine says of it, and the names of its adapters."""
    return replace(
        model,
        created=int(time.time()),
        fingerprint=fingerprint(info, version),
        context_length=info.max_model_len,
        tasks=info.tasks,
        images=None if info.no_images else model.images,
        no_images=info.no_images if info.no_images or model.images is not None else TEXT_ALONE,
        adapters=() if adapters is None else adapters.names,
    )


def weights_group(app: FastAPI, client: EngineClient) -> WeightsGroup:
    """What changes the weights. Where another API process may have them changed, the app is told."""
    if not isinstance(client.link, HubLink):
        return WeightsGroup(Weights(client))
    client.link.on_version.append(partial(_tell_version, app))
    return NoWeightsGroup(client.link)


def _tell_version(app: FastAPI, version: str) -> None:
    runtime: Runtime | None = getattr(app.state, "runtime", None)
    if runtime is not None:  # else it is about to be made, of that version
        app.state.model = replace(app.state.model, fingerprint=fingerprint(runtime.info, version))


def _add_routes(app: FastAPI) -> None:
    generating = (completions, chat, messages, responses, conversations, decisions, vectors, invocations, ollama)
    for module in (*generating, batch_routes, files, streams, models, tokenize, requests, engine, status, page):
        app.include_router(module.router)
    with_bodies(app, CompletionRequest, ChatRequest, MessagesRequest, CountTokensRequest, ResponsesRequest)
    with_bodies(app, ConversationRequest, MetadataRequest, ItemsRequest, DecisionRequest)
    with_bodies(app, EmbeddingRequest, PoolingRequest, ClassificationRequest, ScoreRequest, RerankRequest)
    with_bodies(app, TokenizeRequest, DetokenizeRequest, UpdateWeightsRequest, WeightsGroupRequest)
    with_bodies(app, LoadAdapterRequest, UnloadAdapterRequest, OllamaShowRequest, BatchRequest)
    with_bodies(app, OllamaChatRequest, OllamaGenerateRequest, OllamaEmbedRequest, OllamaEmbeddingsRequest)


def _runtime(
    config: ServerConfig,
    info: EngineInfo,
    model: ServedModel,
    admission: Admission,
    client: EngineClient,
    group: WeightsGroup,
    workers: WorkerPool,
    turns: Turns,
    background: Background,
    gateways: Gateways,
    adapters: Adapters | None,
    parts: Durable | None,
) -> Runtime:
    metrics = Metrics(client, model.names[0], info.max_model_len, admission.rejections)
    log = RequestLog(config.request_history)
    max_body = int(config.max_body_size * 2**20)
    metrics.tell_cache(info, config)
    if parts is not None:
        metrics.tell_durable(parts, model.names[0])
    if adapters is not None:
        metrics.tell_adapters(client, config.max_loras)
    return Runtime(
        config=config,
        client=client,
        weights=group.weights,
        weights_group=group,
        info=info,
        started=model.created,
        metrics=metrics,
        live_view=LiveView(client, metrics.rolling),
        request_log=log,
        others=Others(client, metrics, log),
        bodies=Bodies(max_body, BODIES_BYTES),
        workers=workers,
        grammars=GrammarChecker(workers),
        turns=turns,
        kept=Kept(),
        background=background,
        durable=parts,
        gateways=gateways,
        adapters=adapters,
    )


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
    if config.data_dir is not None:
        app.add_middleware(streams.LastEventMiddleware)
    app.add_middleware(HeldMiddleware, budget=Budget(held))
    app.add_middleware(AuthenticationMiddleware, tenants=tenants, gateways=gateways)
    app.add_middleware(errors.UnexpectedErrorMiddleware)
    if config.allowed_origins:
        app.add_middleware(with_cors, config)
    app.add_middleware(RequestLogMiddleware, ended=ended)


def with_cors(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    """An application that web pages of config.allowed_origins may call."""
    return CORSMiddleware(
        app,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=["*"],
    )


def in_use(client: EngineClient) -> set[str]:
    """Digests of the adapters that open requests need."""
    return {each.digest for each in (*client.running_adapters, *client.waiting_adapters)}


def open_spans(config: ServerConfig, client: EngineClient) -> OpenTelemetrySpans | None:
    """What sends traces, if the operator wants any."""
    endpoint = config.otlp_traces_endpoint
    return None if endpoint is None else OpenTelemetrySpans(otlp_exporter(endpoint), client.history)


def open_kept(config: ServerConfig) -> Data | None:
    """What is kept, if the operator wants anything kept. Raises ConfigError."""
    if config.data_dir is None:
        return None
    return open_data(config.data_dir, int(config.max_stored_size * 2**30))
