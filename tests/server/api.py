"""A server without a socket, with a fake engine, and its client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx
from fastapi import FastAPI
from openai import AsyncOpenAI

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_core_client import EngineCoreClient
from quire.server.app import create_app
from quire.server.config import ServerConfig
from quire.server.runtime.model_runtime import ModelRuntime
from quire.server.served_model import ServedModelSpec
from tests.server.fake import FakeEngine, hashed
from tests.server.forked import FORKED
from tests.texts import CHATML, byte_level_tokenizer

VOCAB_SIZE = 259
NAME = "owner/model"


@dataclass(frozen=True)
class Api:
    engine: FakeEngine
    app: FastAPI
    http: httpx.AsyncClient
    openai: AsyncOpenAI

    @property
    def runtime(self) -> ModelRuntime:
        runtime = self.app.state.server.models.loaded_runtimes[0]
        assert isinstance(runtime, ModelRuntime)
        return runtime

    async def post(self, path: str, body: Any, status: int = 200) -> Any:
        """Return the decoded response, after a check of its status."""
        response = await self.http.post(path, json=body)
        assert response.status_code == status, response.text
        return response.json()

    async def stream_text(self, path: str, body: dict[str, Any]) -> str:
        response = await self.http.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return response.text

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Return the events of a stream without the last one, which must be [DONE]."""
        events = parse_events(await self.stream_text(path, body))
        assert events.pop() == "[DONE]"
        return events


def parse_events(text: str) -> list[Any]:
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def make_app(
    engine: EngineCoreClient,
    *,
    defaults: dict[str, float] | None = None,
    chat_template: str | None = CHATML,
    **options: Any,
) -> FastAPI:
    config = ServerConfig(**{"served_model_name": [NAME, "second"], **options})
    client, tokenizer = EngineClient(engine), byte_level_tokenizer(chat_template).tokenizer
    spec = ServedModelSpec(
        config, tokenizer, VOCAB_SIZE, defaults or {}, model_type="llama", weights_format="safetensors"
    )
    return create_app(client, spec, launch_process=FORKED)


@cache
def describe_api() -> dict[str, Any]:
    """The OpenAPI description."""
    return make_app(FakeEngine(hashed(b"abc "))).openapi()


@asynccontextmanager
async def open_http(app: FastAPI, client: tuple[str, int] = ("127.0.0.1", 123)) -> AsyncIterator[httpx.AsyncClient]:
    """Start the app; its HTTP client comes from the address and port `client`."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False, client=client)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://quire") as http,
    ):
        yield http


@asynccontextmanager
async def open_app(app: FastAPI, engine: Any) -> AsyncIterator[Api]:
    async with open_http(app) as http:
        openai = AsyncOpenAI(base_url="http://quire/v1", api_key="none", http_client=http, max_retries=0)
        yield Api(engine, app, http, openai)


@asynccontextmanager
async def open_api(
    engine: FakeEngine, *, defaults: dict[str, float] | None = None, chat_template: str | None = CHATML, **options: Any
) -> AsyncIterator[Api]:
    async with open_app(make_app(engine, defaults=defaults, chat_template=chat_template, **options), engine) as api:
        yield api
