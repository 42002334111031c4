"""Starts an engine, the app and an HTTP server together: what serve, chat and run share."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from socket import AF_UNIX, socket

import uvicorn
import uvloop
from fastapi import FastAPI

from quire.engine.checkpoint.model_resolver import resolve_model, resolve_weights
from quire.engine.checkpoint.overrides import load_model_config, read_sampling_defaults, resolve_model_with_overrides
from quire.engine.checkpoint.pooling import read_pooling_and_tasks
from quire.engine.checkpoint.tensor_headers import read_checkpoint_size
from quire.engine.common.errors import ConfigError, Overloaded
from quire.engine.images.multimodal_prompt import make_multimodal_prompt_builder
from quire.engine.link.client import EngineClient
from quire.engine.lora.target_modules import ModuleShapes, adaptable_modules
from quire.engine.processes.socket_folder import SocketFolder
from quire.engine.replicas.replicas import processes
from quire.engine.text.null_tokenizer import load_tokenizer
from quire.server.access.admission import SHUTTING_DOWN_MESSAGE
from quire.server.access.allowed_hosts import AllowedHosts
from quire.server.adapter_registry import check_local_adapters
from quire.server.app import create_app
from quire.server.config import ServerConfig
from quire.server.connection import ConnectionTimeouts, HttpConnection
from quire.server.peers import PeerLink
from quire.server.runtime.model_runtime import ModelRuntime
from quire.server.runtime.server_context import ModelDispatcher
from quire.server.served_model import ServedModelSpec
from quire.server.write_batching import WriteBatcher

PRIVATE_SERVER_SETTINGS: dict[str, object] = {
    "api_key": [],
    "api_key_file": None,
    "admin_api_key": [],
    "requests_per_minute": None,
    "tokens_per_minute": None,
    "ssl_certfile": None,
    "ssl_keyfile": None,
    "ssl_ca_certs": None,
}
"""Settings for a server that only this process can reach: it needs no keys, limits or TLS."""

_DRAIN_POLL_SECONDS = 0.05
_ORPHANED_REQUEST_SECONDS = 2.0
"""In which requests may end whose engine is gone."""


class HttpServer(uvicorn.Server):
    """A uvicorn server that catches no signals, calls `on_ready` when it listens, and drains before it stops."""

    def __init__(self, app: FastAPI, config: ServerConfig, on_ready: Callable[[], None]) -> None:
        """Of an app whose lifespan has begun. Raises ConfigError for certificates that cannot be used."""
        self._models: ModelDispatcher = app.state.server.models
        bounds = ConnectionTimeouts(config.read_timeout, config.write_timeout, self._models.loaded_runtimes[0].client)
        tls = tls_context(config)
        self._hosts: AllowedHosts = app.state.hosts
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(HttpConnection, bounds, WriteBatcher()),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                ssl_context_factory=None if tls is None else lambda *_: tls,
                log_config=None,
                log_level=config.uvicorn_log_level,
                access_log=False,  # server/observe/log_setup.py writes it
                timeout_keep_alive=75,  # longer than the minute of most proxies, which might reuse a closed connection
                timeout_graceful_shutdown=max(1, round(config.shutdown_timeout)),
            )
        )
        self._on_ready = on_ready
        self._drain_timeout = config.shutdown_timeout

    def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]
        return nullcontext()

    async def startup(self, sockets: list[socket] | None = None) -> None:
        self._hosts.enforce_if_loopback_only(sockets or [])
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready()

    async def drain_requests(self) -> None:
        """Refuse new generations with 503, and stop when the open ones have ended.

        Those still open after --shutdown-timeout end with an error.
        """
        models = self._models.loaded_runtimes
        ends = time.monotonic() + self._drain_timeout
        for each in models:
            each.admission.start_draining()
        while any(_is_runtime_busy(each) for each in models) and time.monotonic() < ends:  # noqa: ASYNC110 - a poll is soon enough
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        for each in models:
            each.client.end_all(Overloaded(SHUTTING_DOWN_MESSAGE))
            each.workers.fail_jobs(Overloaded(SHUTTING_DOWN_MESSAGE))
        self.config.timeout_graceful_shutdown = max(1, round(ends - time.monotonic()))
        self.should_exit = True

    async def wait_for_requests(self) -> None:
        """Wait until the requests have ended whose engine is gone: the end of the event loop would cancel them, and
        each would be a traceback in the log."""
        if tasks := self.server_state.tasks:
            await asyncio.wait(tasks, timeout=_ORPHANED_REQUEST_SECONDS)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        for each in self._models.loaded_runtimes:
            each.live_view.close_streams()
        await super().shutdown(sockets)


def _is_runtime_busy(runtime: ModelRuntime) -> bool:
    return bool(runtime.client.num_open or runtime.workers.num_jobs)


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """The context for HTTPS; None for plain HTTP. Raises ConfigError naming the setting that is wrong."""
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
        if config.ssl_keyfile is None and _lacks_private_key(config.ssl_certfile):
            lacking = f"{config.ssl_certfile} holds no private key; name it with --ssl-keyfile"
            raise ConfigError(f"ssl_certfile: {lacking}") from None
        raise ConfigError(f"ssl_certfile: cannot be used with its key and authorities: {error}") from None
    return context


def _lacks_private_key(certfile: Path) -> bool:
    """Whether it is a PEM file of certificates alone, of which OpenSSL says "PEM lib"."""
    content = certfile.read_bytes()
    return b"CERTIFICATE-----" in content and b"PRIVATE KEY-----" not in content


@asynccontextmanager
async def open_engine_app(
    config: ServerConfig, client: EngineClient, link: PeerLink | None = None
) -> AsyncIterator[FastAPI]:
    """The app, with the engine of a launched client ready; both end with the block. `link`: see create_app.

    The app's lifespan is entered here and not by uvicorn, which would log an error of the engine's start instead of
    raising it. Raises ConfigError for unusable certificates and keys before the model is loaded.
    """
    try:
        tls_context(config)
        app = create_app(client, *await asyncio.to_thread(load_served_model_spec, config), link)
        async with app.router.lifespan_context(app):
            yield app
    finally:
        await client.link.stop()


def load_served_model_spec(config: ServerConfig) -> tuple[ServedModelSpec, ModuleShapes | None]:
    """Read the model files that the server needs, while the engine loads the weights. Returns the model, and those
    of its modules that may have adapters. Raises ModelError.

    Of the weights it reads the headers, because the engine, which has much to import, would find what is wrong with
    them seconds later.
    """
    path = resolve_model_with_overrides(config)
    model_config, defaults = load_model_config(config, path), read_sampling_defaults(config)
    vocab_size, (pooling, _) = model_config.vocab_size, read_pooling_and_tasks(path, model_config, config)
    if config.load_format == "auto":
        read_checkpoint_size(resolve_weights(config))
    tokenizer_path = resolve_model(config.tokenizer, config.revision) if config.tokenizer else path
    skip = config.skip_tokenizer_init
    tokenizer = load_tokenizer(tokenizer_path, config.chat_template, vocab_size, model_config.eos_token_ids, skip=skip)
    modules = adaptable_modules(model_config) if config.enable_lora else None
    check_local_adapters(config, modules)
    images = make_multimodal_prompt_builder(path, tokenizer)
    return ServedModelSpec(
        config, tokenizer, vocab_size, defaults, pooling=pooling, multimodal_prompt_builder=images
    ), modules


@contextmanager
def run_server_on_private_socket(config: ServerConfig) -> Iterator[str]:
    """Serve `config`'s model from a thread, on a private Unix socket whose path is yielded.

    Raises what starting the engine raises.
    """
    # The socket is in a directory that only this user can read, so no keys are needed.
    config = config.model_copy(update=PRIVATE_SERVER_SETTINGS)
    client = processes(config)
    client.link.launch()
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
            if not ready.done() and client.link.pid is not None:  # interrupted while the engine starts
                os.kill(client.link.pid, signal.SIGTERM)
            with suppress(Exception):
                ready.result().should_exit = True
            thread.join()


def _run_server_thread(config: ServerConfig, client: EngineClient, listener: socket, ready: Future[HttpServer]) -> None:
    """Start the engine, serve on `listener`, stop both. Runs in a thread; `ready` gets the server or the error."""

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
