"""`quire serve`: serves a model through the OpenAI API until Ctrl-C, SIGTERM or SIGHUP.
Binds the port first, to report a taken port at once. Imports the API while the engine process loads the model.
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
from typing import TYPE_CHECKING

import uvloop

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.replicated_client import processes
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, EngineError
from quire.server.cli.announcement import build_announcement, listen_url
from quire.server.cli.flags import add_flag_table, build_parser
from quire.server.cli.models.pull import pull_configured_model_if_missing
from quire.server.cli.plan.machine import Machine, detect_machine
from quire.server.cli.process_setup import INTERRUPTED_STATUS, WatchSignals, raise_open_file_limit, watch_signals
from quire.server.cli.settings_flags import add_settings_flags, parse_settings
from quire.server.config import ServerConfig
from quire.server.http.listener import open_listener, warn_if_unprotected
from quire.server.observe import log_setup

if TYPE_CHECKING:
    from fastapi import FastAPI

    from quire.server.cli.multi_model import MultiModelHost
    from quire.server.http.server import HttpServer
    from quire.server.runtime.model_runtime import ModelRuntime

log = logging.getLogger("quire.server.cli.serve")
HEALTH_POLL_SECONDS = 0.5
_MEMORY_SETTINGS = ("model", "max_model_len", "gpu_memory_utilization", "kv_cache_memory", "max_num_batched_tokens")
_GC_THRESHOLDS = 5000, 10, 20
"""In two rounds of 16 beam searches of 64 beams, garbage collection scanned all objects 34 times with Python's
defaults, 20 to 30 ms each, and twice with these thresholds.
"""
_THREAD_SWITCH_SECONDS = 0.0005
"""With the default of 5 ms, a stream's first token waited 5 ms for the thread that writes to --data-dir."""


def main(argv: Sequence[str], started: float) -> int:
    parser = build_parser(
        "quire serve",
        "Serve a model behind the OpenAI API.",
        {
            "name": {
                "nargs": "?",
                "metavar": "MODEL",
                "help": "directory, .gguf file, hub id or short name; default: the embedded model",
            },
            "-hf -hfr --hf-repo": {"dest": "gguf", "metavar": "OWNER/REPO[:TAG]", "help": "a GGUF file on the hub"},
        },
        usage="quire serve [MODEL] [--config FILE] [flags]",
        epilog="Each setting may also come from a QUIRE_* environment variable (--max-model-len: QUIRE_MAX_MODEL_LEN) "
        "or a TOML file (max_model_len = 4096); flags win over variables, variables over the file.",
        add_help=False,
    )
    add_settings_flags(parser, ServerConfig, {EngineConfig: "engine", ServerConfig: "server"})
    models_file = "TOML file of several models to serve, or cache for all downloaded ones"
    add_flag_table(parser, {"--models": {"type": Path, "metavar": "FILE", "help": models_file}})
    args, config = parse_settings(parser, argv, ServerConfig, "name", gguf="gguf")
    if config.uds is not None and (other := next((name for name in ("host", "port") if hasattr(args, name)), None)):
        parser.error(f"--uds and --{other} cannot be combined: a server listens either on a Unix socket or on a port")
    if config.node_rank:
        if args.models is not None:
            parser.error("--models has no place on machines but the first (--node-rank)")
        status: int = import_module("quire.engine.main").run_node(config)
        return status
    models: SingleModelHost | MultiModelHost | None = None
    if config.api_server_count > 1:
        api_process_manager = import_module("quire.server.cli.api_process_manager")
        api_process_manager.check_multi_process_settings(config, args.models)
    elif args.models is None:
        models = SingleModelHost(config)
    else:
        if "model" in config.model_fields_set:
            parser.error("MODEL and --models both say what to serve: give only one of them")
        models = import_module("quire.server.cli.multi_model").MultiModelHost(config, args.models)
    log_setup.set_up_logging(config)
    raise_open_file_limit()
    with open_listener(config) as listener:
        warn_if_unprotected(config, listener)
        if args.models is None:
            pull_configured_model_if_missing(config)
        service = (
            api_process_manager.ApiProcessManager(config, listener, started)
            if models is None
            else ServerRun(config, models, listener, started)
        )
        status = uvloop.run(service.run())
        if service.was_ready:
            by = f", by {service.end_signal}" if service.end_signal else ""
            log.info("the server has ended after %.1f s%s, with status %d", time.perf_counter() - started, by, status)
        return status


def _import_slow_modules() -> None:
    import_module("quire.server.cli.plan.model_plan")
    import_module("quire.server.cli.engine_app")


class SingleModelHost:
    def __init__(self, config: ServerConfig, client: EngineClient | None = None) -> None:
        self._config = config
        self._client = client or processes(config)
        self._machine: Machine | None = None
        self._runtime: ModelRuntime | None = None

    @property
    def alive(self) -> bool:
        return self._client.alive

    @property
    def num_open(self) -> int:
        return self._client.num_open

    def launch_engine(self) -> None:
        self._machine = detect_machine(gpu=self._config.device != "cpu")
        self._client.engine_core.launch()

    @asynccontextmanager
    async def open_app(self) -> AsyncIterator[FastAPI]:
        from quire.server.cli.engine_app import open_engine_app

        try:
            async with open_engine_app(self._config, self._client) as app:
                self._runtime = app.state.server.models.loaded_runtimes[0]
                self._runtime.workers.start_fork_server()  # the first large request need not wait for it
                yield app
        except ConfigError as error:
            if error.param not in _MEMORY_SETTINGS or self._machine is None:
                raise
            from quire.server.cli.plan.model_plan import memory_advice

            if not (advice := await asyncio.to_thread(memory_advice, self._config, self._machine)):
                raise
            raise ConfigError(f"{error.param}: {advice}", param=error.param) from None

    async def stop(self) -> None:
        await self._client.engine_core.stop()

    def announcement_text(self, base: str, seconds: float, tls: ssl.SSLContext | None) -> str:
        from quire.server.cli.plan.model_plan import predict_kv_tokens

        assert self._runtime is not None
        assert self._machine is not None
        formats, info = self._runtime.model.chat_formats, self._runtime.info
        planned = predict_kv_tokens(self._config, self._machine)
        tools, chats = formats.tools_source, formats.renderer.has_template
        return build_announcement(
            self._config, info, base, seconds, planned, tool_format_source=tools, tls=tls, has_chat_template=chats
        )


class ServerRun:
    def __init__(
        self,
        config: ServerConfig,
        models: SingleModelHost | MultiModelHost,
        listener: socket.socket,
        started: float,
        signal_watcher: WatchSignals = watch_signals,
    ) -> None:
        self._config = config
        self._signal_watcher = signal_watcher
        self._listener = listener
        self._started = started
        self._models = models
        self._server: HttpServer | None = None
        self._num_signals = 0
        self.end_signal = ""
        self._drain_task: asyncio.Task[None] | None = None

    @property
    def was_ready(self) -> bool:
        return self._server is not None

    async def run(self) -> int:
        main_task = asyncio.current_task()
        assert main_task is not None
        with self._signal_watcher(asyncio.get_running_loop(), partial(self._on_signal, main_task)):
            self._models.launch_engine()
            try:
                await asyncio.to_thread(_import_slow_modules)
                from quire.server.http.server import HttpServer, tls_context

                async with self._models.open_app() as app:
                    announce = partial(self._announce_and_tune_gc, tls_context(self._config))
                    self._server = HttpServer(app, self._config, announce)
                    return await self._serve_http(self._server)
            except asyncio.CancelledError:
                return 0
            finally:
                await self._models.stop()
                if self._server is not None:
                    await self._server.wait_for_requests()

    async def _serve_http(self, server: HttpServer) -> int:
        watcher = asyncio.create_task(self._stop_when_engine_dies(server))
        await server.serve(sockets=[self._listener])
        watcher.cancel()
        if not self._models.alive:
            raise EngineError("the engine ended and could not be restarted; see the log above")
        if server.force_exit:
            return INTERRUPTED_STATUS
        return 0 if server.started else 1

    async def _stop_when_engine_dies(self, server: HttpServer) -> None:
        while self._models.alive:  # noqa: ASYNC110 - a poll is soon enough
            await asyncio.sleep(HEALTH_POLL_SECONDS)
        server.should_exit = True

    def _on_signal(self, main_task: asyncio.Task[int], number: int) -> None:
        if number == signal.SIGHUP and self._num_signals:
            return  # a closing terminal may send several signals
        self._num_signals += 1
        self.end_signal = self.end_signal or signal.Signals(number).name
        if self._server is None:
            if self._num_signals > 1:
                os._exit(INTERRUPTED_STATUS)
            main_task.cancel()
        elif self._num_signals == 1:
            self._drain_task = asyncio.create_task(self._server.drain_requests())
            if self._models.num_open:
                count, seconds = self._models.num_open, self._config.shutdown_timeout
                log.info("draining: %d open, at most %g s; Ctrl-C again ends them at once", count, seconds)
        else:
            self._server.force_exit = self._server.should_exit = True

    def _announce_and_tune_gc(self, tls: ssl.SSLContext | None) -> None:
        host, port = ("localhost", None) if self._config.uds is not None else self._listener.getsockname()[:2]
        seconds = time.perf_counter() - self._started
        base = listen_url(host, port, tls=tls is not None)
        self.publish_announcement(self._models.announcement_text(base, seconds, tls))
        gc.freeze()  # no garbage collection of long-lived objects
        gc.set_threshold(*_GC_THRESHOLDS)
        sys.setswitchinterval(_THREAD_SWITCH_SECONDS)

    def publish_announcement(self, announcement: str) -> None:
        with suppress(OSError):  # stdout may be closed or full
            print(announcement, flush=True)
