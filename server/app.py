"""The application: routes and the error table around one engine."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from quire.engine.client.client import EngineClient
from quire.engine.text.chat_template import ChatRenderer
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import EngineInfo
from quire.server import errors
from quire.server.access.admission import Admission
from quire.server.access.authentication import AuthenticationMiddleware
from quire.server.access.body_limits import BodyLimitMiddleware
from quire.server.access.tenants import Tenants
from quire.server.config import ServerConfig
from quire.server.formats.grammars import GrammarChecker
from quire.server.formats.message import ChatFormats
from quire.server.observe.live_view import LiveView
from quire.server.observe.logs import log_request
from quire.server.observe.metrics import Metrics
from quire.server.observe.opentelemetry import OpenTelemetrySpans, otlp_exporter
from quire.server.observe.request_log import RequestLog, RequestLogMiddleware, RequestRecord
from quire.server.routes import chat, completions, engine, models, page, requests, status, tokenize
from quire.server.runtime import Runtime
from quire.server.served_model import ServedModel
from quire.server.version import VERSION


def create_app(
    config: ServerConfig,
    client: EngineClient,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    generation_defaults: Mapping[str, float],
) -> FastAPI:
    """An ASGI application that serves one model; its lifespan starts the client and stops it.

    The model's token ids run from 0 to vocab_size - 1. generation_defaults has the temperature, top_p, top_k, min_p and
    repetition_penalty of generation_config.json. Raises ConfigError for API keys that cannot be used; the lifespan
    raises what client.start() raises.
    """
    tenants = Tenants(config)
    client.history.keep = config.request_history
    ended: list[Callable[[RequestRecord], None]] = [log_request] if config.log_format == "json" else []
    endpoint = config.otlp_traces_endpoint
    spans = None if endpoint is None else OpenTelemetrySpans(otlp_exporter(endpoint), client.history)
    if spans is not None:
        ended.append(spans.ended)
    renderer = ChatRenderer(tokenizer.chat_templates, tokenizer.special_tokens)
    grammars = GrammarChecker(tokenizer, vocab_size)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            info = await client.start()
            app.state.model = model = ServedModel(
                names=config.model_names,
                created=int(time.time()),
                fingerprint=_fingerprint(info),
                context_length=info.max_model_len,
                vocab_size=vocab_size,
                sampling_defaults=generation_defaults,
                tokenizer=tokenizer,
                renderer=renderer,
                formats=ChatFormats.chosen(config, tokenizer.chat_templates),
                grammars=grammars,
            )
            app.state.admission = Admission(client, config, keyed=tenants.closed)
            app.state.runtime = _runtime(config, client, info, model)
            yield
        finally:
            await grammars.close()
            await client.stop()
            if spans is not None:
                await asyncio.to_thread(spans.close)

    app = FastAPI(title="Quire", version=VERSION, lifespan=lifespan, redirect_slashes=False, strict_content_type=False)
    errors.install(app)
    _add_middleware(app, config, tenants, ended)
    for module in (completions, chat, models, tokenize, requests, engine, status, page):
        app.include_router(module.router)
    return app


def _runtime(config: ServerConfig, client: EngineClient, info: EngineInfo, model: ServedModel) -> Runtime:
    metrics = Metrics(client, model.names[0], info.max_model_len)
    metrics.tell_cache(info, config)
    return Runtime(
        config=config,
        client=client,
        info=info,
        started=model.created,
        metrics=metrics,
        live_view=LiveView(client, metrics.recent),
        request_log=RequestLog(config.request_history),
    )


def _add_middleware(
    app: FastAPI, config: ServerConfig, tenants: Tenants, ended: Sequence[Callable[[RequestRecord], None]]
) -> None:
    """Add the middleware, the innermost first: a request meets the one added last first."""
    app.add_middleware(BodyLimitMiddleware, max_bytes=int(config.max_body_size * 2**20))
    app.add_middleware(AuthenticationMiddleware, tenants=tenants)
    app.add_middleware(errors.UnexpectedErrorMiddleware)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=["*"],
        )
    app.add_middleware(RequestLogMiddleware, ended=ended)


def _fingerprint(info: EngineInfo) -> str:
    """A name of all that decides a seed's tokens: Quire's version, the model, its type, the device and the backend. The
    end says whether the batch decides them too (see `quire verify`)."""
    parts = (VERSION, info.model, info.dtype, info.device, info.backend)
    digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=6).hexdigest()
    return f"fp_{digest}_{'deterministic' if info.deterministic else 'batch-dependent'}"
