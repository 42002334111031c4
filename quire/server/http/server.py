from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from socket import socket

import uvicorn
from fastapi import FastAPI

from quire.engine.common import clock
from quire.engine.common.errors import ConfigError, Overloaded
from quire.server.access.admission import SHUTTING_DOWN_MESSAGE
from quire.server.access.allowed_hosts import AllowedHosts
from quire.server.config import ServerConfig
from quire.server.http.connection import ConnectionTimeouts, HttpConnection
from quire.server.http.websocket import WebSocketConnection
from quire.server.http.write_batching import WriteBatcher
from quire.server.runtime.model_runtime import ModelRuntime
from quire.server.runtime.server_context import ModelDispatcher

_DRAIN_POLL_SECONDS = 0.05
_ORPHANED_REQUEST_SECONDS = 2.0
"""Shutdown waits this long for a dead engine's requests."""


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers. Drains before it stops."""

    def __init__(self, app: FastAPI, config: ServerConfig, on_ready: Callable[[], None]) -> None:
        """Call inside the app's lifespan. Raises ConfigError for unusable certificates."""
        self._models: ModelDispatcher = app.state.server.models
        bounds = ConnectionTimeouts(config.read_timeout, config.write_timeout, self._models.loaded_runtimes[0].client)
        batcher = WriteBatcher()
        tls = tls_context(config)
        self._hosts: AllowedHosts = app.state.hosts
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(HttpConnection, bounds, batcher),  # type: ignore[arg-type]
                ws=partial(WebSocketConnection, bounds, batcher),  # type: ignore[arg-type]
                ws_ping_timeout=None,  # simple clients answer pings only while they wait for a response
                ws_per_message_deflate=False,  # a small message may expand to gigabytes
                lifespan="off",
                ssl_context_factory=None if tls is None else lambda *_: tls,
                log_config=None,
                log_level=config.uvicorn_log_level,
                access_log=False,  # server/observe/request_log.py writes it
                timeout_keep_alive=75,  # most proxies wait a minute, and must not reuse a closed connection
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
        """Answers new generations with 503. Generations that are open after --shutdown-timeout fail."""
        models = self._models.loaded_runtimes
        ends = clock.monotonic() + self._drain_timeout
        for each in models:
            each.admission.start_draining()
        while any(_is_runtime_busy(each) for each in models) and clock.monotonic() < ends:  # noqa: ASYNC110 - a poll is soon enough
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        for each in models:
            each.client.end_all(Overloaded(SHUTTING_DOWN_MESSAGE))
            each.workers.fail_jobs(Overloaded(SHUTTING_DOWN_MESSAGE))
        self.config.timeout_graceful_shutdown = max(1, round(ends - clock.monotonic()))
        self.should_exit = True

    async def wait_for_requests(self) -> None:
        """Waits for a dead engine's requests. Otherwise closing the event loop would cancel them, each with a
        traceback.
        """
        if tasks := self.server_state.tasks:
            await asyncio.wait(tasks, timeout=_ORPHANED_REQUEST_SECONDS)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        for each in self._models.loaded_runtimes:
            each.live_view.close_streams()
        await super().shutdown(sockets)


def _is_runtime_busy(runtime: ModelRuntime) -> bool:
    return bool(runtime.client.num_open or runtime.workers.num_jobs)


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Returns None for plain HTTP. Raises ConfigError."""
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
            lacking = f"{config.ssl_certfile} has no private key; give it with --ssl-keyfile"
            raise ConfigError(f"ssl_certfile: {lacking}") from None
        raise ConfigError(f"ssl_certfile: cannot be used with its key and authorities: {error}") from None
    return context


def _lacks_private_key(certfile: Path) -> bool:
    """OpenSSL would only report "PEM lib"."""
    content = certfile.read_bytes()
    return b"CERTIFICATE-----" in content and b"PRIVATE KEY-----" not in content
