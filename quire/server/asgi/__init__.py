"""An application factory for external ASGI servers:

    QUIRE_MODEL=Qwen/Qwen3-0.6B uvicorn --factory quire.server.asgi:create_app

Settings are QUIRE_* variables; the ASGI server sets address, port and TLS. Only `quire serve` cuts off slow readers,
drains before it ends, and shares a port among API processes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from quire.engine.client.replicated_client import processes
from quire.engine.common.errors import refuse_setting_if
from quire.engine.settings.settings_reader import load_settings
from quire.server import app as application
from quire.server.cli.models.pull import pull_configured_model_if_missing
from quire.server.config import ServerConfig
from quire.server.observe import log_setup
from quire.server.runtime.model_spec_loader import load_served_model_spec


def create_app() -> FastAPI:
    """The app's lifespan starts and stops the engine. Raises ConfigError."""
    config = load_settings(ServerConfig, {}, other_settings=ServerConfig.model_fields)
    for name in ("api_server_count", "nnodes"):
        refuse_setting_if(
            name, getattr(config, name) > 1 and "works only with `quire serve`, not with an application factory"
        )
    log_setup.set_up_logging(config)
    pull_configured_model_if_missing(config)
    client = processes(config)
    app = application.create_app(client, *load_served_model_spec(config))
    inner_lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def with_engine(app: FastAPI) -> AsyncIterator[None]:
        client.engine_core.launch()
        try:
            async with inner_lifespan(app):
                yield
        finally:
            await client.engine_core.stop()

    app.router.lifespan_context = with_engine
    return app
