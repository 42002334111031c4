"""An engine, the app and a socket, brought up together: what serve, chat and run share."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from socket import AF_UNIX, socket

import uvicorn
import uvloop
from fastapi import FastAPI

from quire.engine.checkpoint.files import read_generation_defaults, read_model_config, resolve_model
from quire.engine.client.supervisor import ProcessClient
from quire.engine.errors import ConfigError, Overloaded
from quire.engine.text.tokenizer import Tokenizer
from quire.server.access.admission import SHUTTING_DOWN
from quire.server.app import create_app
from quire.server.config import ServerConfig
from quire.server.connection import Bounds, Connection

PRIVATE_SERVER: dict[str, object] = {
    **{"api_key": [], "api_key_file": None, "admin_api_key": []},
    **{"requests_per_minute": None, "tokens_per_minute": None},
    **{"ssl_certfile": None, "ssl_keyfile": None, "ssl_ca_certs": None},
}
"""Settings of a server that nobody else can reach."""

_DRAIN_SECONDS = 0.05


class HttpServer(uvicorn.Server):
    """uvicorn, told when to stop instead of catching signals itself, and telling when it listens."""

    def __init__(self, app: FastAPI, config: ServerConfig, on_ready: Callable[[], None]) -> None:
        """Raises ConfigError for certificates that cannot be used."""
        bounds = Bounds(config.read_timeout, config.write_timeout, app.state.runtime.client)
        tls = tls_context(config)
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(Connection, bounds),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                ssl_context_factory=None if tls is None else lambda *_: tls,
                log_config=None,
                log_level=config.uvicorn_log_level,
                access_log=not config.disable_access_log,
                timeout_keep_alive=75,  # longer than the minute of most proxies, who would use one just closed
                timeout_graceful_shutdown=max(1, round(config.shutdown_timeout)),
            )
        )
        if not config.disable_access_log:
            logging.getLogger("uvicorn.access").setLevel(logging.INFO)  # whatever the level of what else it says
        self._app = app
        self._on_ready = on_ready
        self._patience = config.shutdown_timeout

    def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]
        return nullcontext()

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready()

    async def drain(self) -> None:
        """Take no more generations, but say so; stop when those under way have ended, or time is up: then they end with
        an error."""
        client = self._app.state.runtime.client
        self._app.state.admission.drain()
        ends = time.monotonic() + self._patience
        while client.num_open and time.monotonic() < ends:  # noqa: ASYNC110 - noticed soon enough
            await asyncio.sleep(_DRAIN_SECONDS)
        client.end_all(Overloaded(SHUTTING_DOWN))
        self.config.timeout_graceful_shutdown = max(1, round(ends - time.monotonic()))
        self.should_exit = True

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        self._app.state.runtime.live_view.close()
        await super().shutdown(sockets)


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """None: plain HTTP. Raises ConfigError naming the setting."""
    files = {name: getattr(config, name) for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")}
    if config.ssl_certfile is None:
        if any(files.values()):
            raise ConfigError("ssl_certfile: is needed with ssl_keyfile and ssl_ca_certs")
        return None
    for name, path in files.items():
        try:
            if path is not None:
                path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{name}: cannot read {path}: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"ssl_certfile: cannot be used with its key and authorities: {error}") from None
    return context


@asynccontextmanager
async def running_app(config: ServerConfig, client: ProcessClient) -> AsyncIterator[FastAPI]:
    """The app of a client that has been launched, with its engine ready; both end with the block.

    Its lifespan is entered here and not by uvicorn, which would log what starting the engine raises; this raises it,
    and ConfigError for doors that cannot be built, before the model is loaded.
    """
    try:
        tls_context(config)
        app = await asyncio.to_thread(_build, config, client)
        async with app.router.lifespan_context(app):
            yield app
    finally:
        await client.stop()


def _build(config: ServerConfig, client: ProcessClient) -> FastAPI:
    """What the app needs of the model's files is read while the engine loads the weights. Raises ModelError."""
    path = resolve_model(config.model, config.revision)
    tokenizer_path = resolve_model(config.tokenizer, config.revision) if config.tokenizer else path
    return create_app(
        config,
        client,
        Tokenizer.load(tokenizer_path, config.chat_template),
        vocab_size=read_model_config(path).vocab_size,
        generation_defaults=read_generation_defaults(path),
    )


@contextmanager
def local_server(config: ServerConfig) -> Iterator[str]:
    """A server of `config`'s model in a thread, behind a Unix socket that nobody else can reach: its path.

    Raises what starting the engine raises.
    """
    # Keys guard doors that others can reach; this one has a path only we know.
    config = config.model_copy(update=PRIVATE_SERVER)
    client = ProcessClient(config)
    client.launch()
    with tempfile.TemporaryDirectory(prefix="quire-") as directory, socket(AF_UNIX) as listener:
        path = str(Path(directory) / "http.sock")
        listener.bind(path)
        ready: Future[HttpServer] = Future()
        thread = threading.Thread(target=_host, args=(config, client, listener, ready), name="quire-server")
        thread.start()
        try:
            ready.result()
            yield path
        finally:
            if not ready.done() and client.pid is not None:  # interrupted while the engine starts
                os.kill(client.pid, signal.SIGTERM)
            with suppress(Exception):
                ready.result().should_exit = True
            thread.join()


def _host(config: ServerConfig, client: ProcessClient, listener: socket, ready: Future[HttpServer]) -> None:
    """A thread's work: start the engine, serve on `listener`, stop both. `ready` gets the server, or what failed."""

    async def host() -> None:
        async with running_app(config, client) as app:
            server = HttpServer(app, config, lambda: ready.set_result(server))
            await server.serve(sockets=[listener])

    try:
        uvloop.run(host())
    except Exception as error:
        if ready.done():
            raise
        ready.set_exception(error)
