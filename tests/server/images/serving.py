"""The whole server on a model's folder, with its engine in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from quire.engine.client.engine_client import EngineClient
from quire.engine.offline.in_process_client import InProcessClient
from quire.server.app import create_app
from quire.server.config import ServerConfig
from quire.server.runtime.model_spec_loader import load_served_model_spec
from tests.server.api import Api, open_app
from tests.server.forked import FORKED


@asynccontextmanager
async def serving(config: ServerConfig) -> AsyncIterator[Api]:
    client = EngineClient(InProcessClient(config))
    app = create_app(client, *load_served_model_spec(config), launch_process=FORKED)
    async with open_app(app, client.engine_core) as api:
        yield api
