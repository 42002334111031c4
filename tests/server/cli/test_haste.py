"""A server that receives a second SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any, cast

import httpx
from fastapi import FastAPI

from quire.server.cli.process_setup import INTERRUPTED_STATUS
from quire.server.cli.serve import ServerRun, SingleModelHost
from quire.server.config import ServerConfig
from tests.server.api import NAME, make_app
from tests.server.fake import FakeEngine, hashed


class Models:
    """A host of one model with a slow engine."""

    def __init__(self) -> None:
        self.engine = FakeEngine(hashed(b"abc"), step_seconds=0.05)
        self.alive, self.ready = True, asyncio.Event()

    @property
    def num_open(self) -> int:
        return self.engine.owner.num_open

    def launch_engine(self) -> None:
        """The fake engine needs no launch."""

    @asynccontextmanager
    async def open_app(self) -> AsyncIterator[FastAPI]:
        app = make_app(self.engine)
        async with app.router.lifespan_context(app):
            yield app

    async def stop(self) -> None:
        await self.engine.stop()

    def announcement_text(self, *_: object) -> str:
        self.ready.set()
        return ""


async def test_second_sigterm_ends_open_requests_before_server_exits() -> None:
    """Otherwise the end of the event loop cancels each request, and the HTTP server logs a traceback for it."""
    config, models = ServerConfig(served_model_name=[NAME]), Models()
    main = cast(Any, asyncio.current_task())
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        service = ServerRun(config, cast(SingleModelHost, models), listener, 0.0, lambda *_: nullcontext())
        running = asyncio.create_task(service.run())
        await models.ready.wait()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        body = {"prompt": "a", "max_tokens": 500, "stream": True, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=url) as http, http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            for _ in range(2):
                service._on_signal(main, signal.SIGTERM)
            assert await running == INTERRUPTED_STATUS
            assert service._server is not None
            assert not service._server.server_state.tasks
            assert any(["the engine was stopped" in line async for line in lines])
