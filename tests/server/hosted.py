"""Quire's HTTP server with a fake engine, on a free local port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from quire.server.config import ServerConfig
from quire.server.http.server import HttpServer
from tests.server.api import NAME, make_app
from tests.server.fake import FakeEngine


class Port:
    def __init__(self, server: HttpServer, number: int, tls: bool) -> None:
        self.server = server
        self.number = number
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{number}"

    async def send(self, *pieces: bytes, pause: float = 0.0, end: bool = False) -> bytes:
        """Return what comes back until the server closes the connection, or stays silent for a while."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.number)
        reading = asyncio.create_task(_read_all(reader))
        with suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.wait([reading], timeout=pause)
                if reading.done():  # further writes to a closed connection may lose the answer
                    break
            if end and not reading.done():
                writer.write_eof()
        answer = await reading
        writer.close()
        return answer


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    answer = b""
    with suppress(ConnectionError):
        while part := await asyncio.wait_for(reader.read(65536), 20):
            answer += part
    return answer


@asynccontextmanager
async def serving(engine: FakeEngine, **options: Any) -> AsyncIterator[Port]:
    app = make_app(engine, **options)
    config = ServerConfig(**{"served_model_name": [NAME], **options})
    async with app.router.lifespan_context(app):
        ready = asyncio.Event()
        server = HttpServer(app, config, ready.set)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            task = asyncio.create_task(server.serve(sockets=[listener]))
            await ready.wait()
            try:
                yield Port(server, listener.getsockname()[1], config.ssl_certfile is not None)
            finally:
                server.should_exit = server.force_exit = True
                await task


async def idle(engine: FakeEngine) -> None:
    """Wait until the engine has had a request and all its requests have ended."""
    async with asyncio.timeout(60):
        while not engine.seen or engine.running or engine.owner.num_open:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
