from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI

from quire.engine import VERSION
from quire.engine.client.request_history import RequestHistory
from quire.server.access.gateway_headers import TrustedGateways
from quire.server.access.memory_lease import MAX_LEASED_BYTES, MAX_LEASED_IMAGE_BYTES
from quire.server.access.tenants import Tenants
from quire.server.config import ServerConfig
from quire.server.durability.peers import PeerLink
from quire.server.durability.persistence import open_configured_data_dir
from quire.server.observe.request_spans import RequestSpanExporter, create_otlp_exporter
from quire.server.routes.error_handlers import install_error_handlers
from quire.server.routes.middleware import add_middleware
from quire.server.routes.routers import add_routers_with_metrics
from quire.server.runtime.server_startup import OpenModels, OpenStoredData, ServerStartup


def build_app(
    config: ServerConfig,
    tenants: Tenants,
    open_models: OpenModels,
    routers: Sequence[APIRouter] = (),
    *,
    budget_bytes: int = MAX_LEASED_BYTES + MAX_LEASED_IMAGE_BYTES,
    link: PeerLink | None = None,
    open_stored_data: OpenStoredData = open_configured_data_dir,
) -> FastAPI:
    """The app's lifespan opens `open_models` and `open_stored_data`, and raises their errors. `budget_bytes` bounds the
    memory that all requests lease together. `link` leads to the process that owns the stored data; None: this process
    owns it. Raises ConfigError.
    """
    gateways = TrustedGateways(config)

    def histories() -> list[RequestHistory]:
        return [each.client.history for each in app.state.server.models.loaded_runtimes]

    span_exporter = None
    if config.otlp_traces_endpoint is not None:
        span_exporter = RequestSpanExporter(create_otlp_exporter(config.otlp_traces_endpoint), histories)
    startup = ServerStartup(config, tenants, gateways, open_models, open_stored_data, link, span_exporter)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with startup.open_server(app, http_metrics):
            yield

    app = FastAPI(
        title="Quire",
        version=VERSION,
        lifespan=lifespan,
        redirect_slashes=False,
        strict_content_type=False,
        docs_url=None,  # FastAPI's pages load external files
        redoc_url=None,
    )
    install_error_handlers(app)
    http_metrics = add_routers_with_metrics(app, routers)
    add_middleware(app, config, tenants, gateways, span_exporter, budget_bytes, http_metrics)
    return app
