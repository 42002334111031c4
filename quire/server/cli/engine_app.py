from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from socket import AF_UNIX, socket

import uvloop
from fastapi import FastAPI

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.replicated_client import processes
from quire.engine.processes.socket_folder import SocketFolder
from quire.server.app import create_app
from quire.server.config import ServerConfig
from quire.server.durability.peers import PeerLink
from quire.server.http.server import HttpServer, tls_context
from quire.server.runtime.model_spec_loader import load_served_model_spec

PRIVATE_SERVER_SETTINGS: dict[str, object] = {
    "api_key": [],
    "api_key_file": None,
    "admin_api_key": [],
    "metrics_api_key": [],
    "requests_per_minute": None,
    "tokens_per_minute": None,
    "ssl_certfile": None,
    "ssl_keyfile": None,
    "ssl_ca_certs": None,
}
"""Settings of a server that only this process can reach."""


@asynccontextmanager
async def open_engine_app(
    config: ServerConfig, client: EngineClient, link: PeerLink | None = None
) -> AsyncIterator[FastAPI]:
    """Starts and stops the app itself, because uvicorn would log an error of the engine's start instead of raising it.
    Raises ConfigError.
    """
    try:
        tls_context(config)
        app = create_app(client, *await asyncio.to_thread(load_served_model_spec, config), link)
        async with app.router.lifespan_context(app):
            yield app
    finally:
        await client.engine_core.stop()


@contextmanager
def run_server_on_private_socket(config: ServerConfig) -> Iterator[str]:
    """Yields the socket's path. Raises the errors of the engine's start."""
    # Only this user can enter the socket's folder, so no keys are needed.
    config = config.model_copy(update=PRIVATE_SERVER_SETTINGS)
    client = processes(config)
    client.engine_core.launch()
    with closing(SocketFolder()) as folder, socket(AF_UNIX) as listener:
        path = str(folder.http)
        listener.bind(path)
        ready: Future[HttpServer] = Future()
        thread = threading.Thread(
            target=_run_server_thread, args=(config, client, listener, ready), name="quire-server"
        )
        thread.start()
        try:
            ready.result()
            yield path
        finally:
            if not ready.done() and client.engine_core.pid is not None:  # interrupted while the engine starts
                os.kill(client.engine_core.pid, signal.SIGTERM)
            with suppress(Exception):
                ready.result().should_exit = True
            thread.join()


def _run_server_thread(config: ServerConfig, client: EngineClient, listener: socket, ready: Future[HttpServer]) -> None:

    async def serve_socket() -> None:
        async with open_engine_app(config, client) as app:
            server = HttpServer(app, config, lambda: ready.set_result(server))
            await server.serve(sockets=[listener])

    try:
        uvloop.run(serve_socket())
    except Exception as error:
        if ready.done():
            raise
        ready.set_exception(error)
