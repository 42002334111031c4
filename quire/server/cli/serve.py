"""`quire serve`: a model behind the OpenAI API, until Ctrl-C, SIGTERM or SIGHUP.

The order saves time: the port is bound first, so that a taken port is reported at once; then the engine process starts,
and while it loads the model this process imports the API.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import uvloop

from quire.engine.checkpoint.files import must_come, read_raw_config
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError, EngineError, ModelError
from quire.engine.link.client import EngineClient
from quire.engine.replicas.replicas import processes
from quire.server.access.addresses import is_loopback
from quire.server.cli.announcement import announcement, url
from quire.server.cli.environment import INTERRUPTED, SignalsTold, raise_file_limit, signals_told
from quire.server.cli.flags import add, command
from quire.server.cli.models.pull import pull_missing
from quire.server.cli.plan.machine import Machine, this_machine
from quire.server.cli.settings import add_flags, parse
from quire.server.config import ServerConfig
from quire.server.observe import logs

if TYPE_CHECKING:
    from fastapi import FastAPI

    from quire.server.cli.hosting import HttpServer
    from quire.server.cli.several import SeveralModels
    from quire.server.runtime import Runtime

log = logging.getLogger("quire.server.cli.serve")
WATCH_SECONDS = 0.5
_OF_MEMORY = ("model", "max_model_len", "gpu_memory_utilization", "kv_cache_memory", "max_num_batched_tokens")
"""What the engine names when it has too little memory; it may name them for other reasons too."""
OPEN_TO_OTHERS = (
    "whoever reaches %s may use this server, read and delete what it keeps, and watch it: no API key is needed "
    "(--api-key, --api-key-file)"
)
_GC_THRESHOLDS = 5000, 10, 20
"""Most of what requests hold is freed without the collector. With Python's own thresholds it looks at all that is open
again and again: 34 times, for 20 to 30 ms each, in two rounds of 16 beam searches of 64 beams; with these, twice."""
_SWITCH_SECONDS = 0.0005
"""How long a thread may wait for the interpreter while the event loop runs. With Python's 5 ms a stream's first token
waited so long for the thread that writes its call into the journal."""


def main(argv: Sequence[str], started: float) -> int:
    parser = command(
        "quire serve",
        "Serve a model behind the OpenAI API.",
        {
            "name": {
                "nargs": "?",
                "metavar": "MODEL",
                "help": "directory, .gguf file, hub id or short name; default: the embedded one",
            },
            "-hf -hfr --hf-repo": {"dest": "gguf", "metavar": "OWNER/REPO[:TAG]", "help": "a GGUF file of the hub"},
        },
        usage="quire serve [MODEL] [--config FILE] [flags]",
        epilog="Each setting may also come from a QUIRE_* environment variable (--max-model-len: QUIRE_MAX_MODEL_LEN) "
        "or a TOML file (max_model_len = 4096); flags win over variables, variables over the file.",
        add_help=False,
    )
    add_flags(parser, ServerConfig, {EngineConfig: "engine", ServerConfig: "server"})
    models_file = "TOML file of several models to serve, or cache: all that is downloaded; see the docs"
    add(parser, {"--models": {"type": Path, "metavar": "FILE", "help": models_file}})
    args, config = parse(parser, argv, ServerConfig, "name", gguf="gguf")
    if config.node_rank:
        if args.models is not None:
            parser.error("--models has no place on machines but the first (--node-rank)")
        status: int = import_module("quire.engine.main").join(config)
        return status
    models: OneModel | SeveralModels | None = None
    if config.api_server_count > 1:
        shared = import_module("quire.server.cli.api_processes")
        shared.check(config, args.models)
    elif args.models is None:
        models = OneModel(config)
    else:
        if "model" in config.model_fields_set:
            parser.error("MODEL and --models are two ways to say what is served: give one of them")
        models = import_module("quire.server.cli.several").SeveralModels(config, args.models)
    logs.set_up(config)
    raise_file_limit()
    with _bound(config) as listener:
        warn_if_open(config, listener)
        if args.models is None:
            pull_missing(config)
        service = (
            shared.ApiProcesses(config, listener, started)
            if models is None
            else Service(config, models, listener, started)
        )
        status = uvloop.run(service.run())
        if service.was_ready:
            by = f", by {service.ended_by}" if service.ended_by else ""
            log.info("the server has ended after %.1f s%s, with status %d", time.perf_counter() - started, by, status)
        return status


def _bound(config: ServerConfig) -> socket.socket:
    """`bind`; where the port is taken and the model is no model either, one error names both."""
    try:
        return bind(config.host, config.port)
    except ConfigError as error:
        try:
            if not must_come(config.model, config.revision):
                read_raw_config(config.model, config.revision)
        except ModelError as wrong:
            raise ConfigError(f"{error}; {wrong}") from None
        raise


def _import_the_rest() -> ModuleType:
    """What the engine need not wait for: what plans, and what serves HTTP, which is returned."""
    import_module("quire.server.cli.plan.configured")
    return import_module("quire.server.cli.hosting")


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound but does not listen: connections are refused until the model is loaded.

    Raises ConfigError, naming the address, when it is taken or not this machine's.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no valid name"
        shown = host if host.isprintable() else repr(host)
        raise ConfigError(f"cannot listen on {shown}:{port}: {why}; choose another --port or --host") from None
    return listener


def warn_if_open(config: ServerConfig, listener: socket.socket) -> None:
    """Warn the operator of a server that other machines reach and that asks for no keys."""
    if not (config.has_api_keys or is_loopback(listener)):
        log.warning(OPEN_TO_OTHERS, config.host)


class OneModel:
    """What a server serves: a model, from its engine's launch to its end."""

    def __init__(self, config: ServerConfig, client: EngineClient | None = None) -> None:
        """client: one that reaches an engine of another process; None: the engine is to be started."""
        self._config = config
        self._client = client or processes(config)
        self._machine: Machine | None = None
        self._runtime: Runtime | None = None

    @property
    def alive(self) -> bool:
        """False when its engine cannot be brought back."""
        return self._client.alive

    @property
    def num_open(self) -> int:
        return self._client.num_open

    def launch(self) -> None:
        self._machine = this_machine(gpu=self._config.device != "cpu")
        self._client.link.launch()

    @asynccontextmanager
    async def running(self, hosting: Any) -> AsyncIterator[FastAPI]:
        """The app, ready. `hosting` is the module, which takes long to import."""
        try:
            async with hosting.running_app(self._config, self._client) as app:
                self._runtime = app.state.server.models.loaded[0]
                self._runtime.workers.start()  # so that the first large request does not wait for it
                yield app
        except ConfigError as error:
            if error.param not in _OF_MEMORY or self._machine is None:
                raise
            from quire.server.cli.plan.configured import way_out

            if not (told := await asyncio.to_thread(way_out, self._config, self._machine)):
                raise
            raise ConfigError(f"{error.param}: {told}", param=error.param) from None

    async def stop(self) -> None:
        await self._client.link.stop()

    def announcement(self, base: str, seconds: float, tls: ssl.SSLContext | None) -> str:
        from quire.server.cli.plan.configured import predicted_tokens

        assert self._runtime is not None
        assert self._machine is not None
        formats, info = self._runtime.model.formats, self._runtime.info
        planned = predicted_tokens(self._config, self._machine)
        tools, chats = formats.tools_from, formats.renderer.has_template
        return announcement(self._config, info, base, seconds, planned, tools=tools, tls=tls, chats=chats)


class Service:
    """One run of the server: start, serve, drain. `run()` returns the exit status."""

    def __init__(
        self,
        config: ServerConfig,
        models: OneModel | SeveralModels,
        listener: socket.socket,
        started: float,
        signals: SignalsTold = signals_told,
    ) -> None:
        self._config = config
        self._signals_told = signals
        self._listener = listener
        self._started = started
        self._models = models
        self._server: HttpServer | None = None
        self._signals = 0
        self.ended_by = ""
        """The name of the first signal."""
        self._draining: asyncio.Task[None] | None = None

    @property
    def was_ready(self) -> bool:
        return self._server is not None

    async def run(self) -> int:
        main_task = asyncio.current_task()
        assert main_task is not None
        with self._signals_told(partial(self._on_signal, main_task)):
            self._models.launch()
            try:
                hosting = await asyncio.to_thread(_import_the_rest)
                async with self._models.running(hosting) as app:
                    announce = partial(self._announce, hosting.tls_context(self._config))
                    self._server = hosting.HttpServer(app, self._config, announce)
                    return await self._serve(self._server)
            except asyncio.CancelledError:
                return 0
            finally:
                await self._models.stop()
                if self._server is not None:
                    await self._server.ended()

    async def _serve(self, server: HttpServer) -> int:
        watcher = asyncio.create_task(self._watch(server))
        await server.serve(sockets=[self._listener])
        watcher.cancel()
        if not self._models.alive:
            raise EngineError("the engine ended and could not be brought back; see the log above")
        if server.force_exit:
            return INTERRUPTED
        return 0 if server.started else 1

    async def _watch(self, server: HttpServer) -> None:
        """Stop the server when its engine cannot be brought back, so that a process manager restarts both."""
        while self._models.alive:  # noqa: ASYNC110 - a poll is soon enough
            await asyncio.sleep(WATCH_SECONDS)
        server.should_exit = True

    def _on_signal(self, main_task: asyncio.Task[int], number: int) -> None:
        if number == signal.SIGHUP and self._signals:
            return  # a closing terminal may send several; only a repeated Ctrl-C or SIGTERM means haste
        self._signals += 1
        self.ended_by = self.ended_by or signal.Signals(number).name
        if self._server is None:
            if self._signals > 1:
                os._exit(INTERRUPTED)  # the engine ends with this process
            main_task.cancel()
        elif self._signals == 1:
            self._draining = asyncio.create_task(self._server.drain())
            if self._models.num_open:
                count, seconds = self._models.num_open, self._config.shutdown_timeout
                log.info("draining: %d open, at most %g s; Ctrl-C again ends them at once", count, seconds)
        else:
            self._server.force_exit = self._server.should_exit = True

    def _announce(self, tls: ssl.SSLContext | None) -> None:
        host, port = self._listener.getsockname()[:2]
        seconds = time.perf_counter() - self._started
        base = url(host, port, tls=tls is not None)
        self.show(self._models.announcement(base, seconds, tls))
        gc.freeze()  # exempts what lives as long as the process from every later collection
        gc.set_threshold(*_GC_THRESHOLDS)
        sys.setswitchinterval(_SWITCH_SECONDS)

    def show(self, announcement: str) -> None:
        with suppress(OSError):  # the output may be closed or full, which is no reason not to serve
            print(announcement, flush=True)
