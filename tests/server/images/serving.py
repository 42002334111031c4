"""The whole server on a model's folder, with its engine in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from openai import AsyncOpenAI

from quire.engine.client.engine_client import EngineClient
from quire.engine.offline.in_process_client import InProcessClient
from quire.server.cli.engine_app import open_engine_app
from quire.server.config import ServerConfig
from tests.server.api import Api


@asynccontextmanager
async def serving(config: ServerConfig) -> AsyncIterator[Api]:
    client = EngineClient(InProcessClient(config))
    async with open_engine_app(config, client) as app:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://quire", timeout=60) as http:
            openai = AsyncOpenAI(base_url="http://quire/v1", api_key="none", http_client=http, max_retries=0)
            yield Api(client.engine_core, app, http, openai)  # type: ignore[arg-type]
