"""`quire serve`: a model behind the OpenAI API, until Ctrl-C, SIGTERM or SIGHUP.

What takes long goes first and side by side: the port is bound (so a taken one is told of at once), the engine process
starts, and while it loads the model this process imports the API.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import signal
import socket
import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import uvloop

from quire.engine.client.supervisor import ProcessClient
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError, EngineError
from quire.engine.types import EngineInfo
from quire.server.cli.plan.estimate import predicted_tokens
from quire.server.cli.plan.machine import Machine, this_machine
from quire.server.cli.settings import add_flags, parse
from quire.server.config import ServerConfig
from quire.server.observe import logs
from quire.server.version import VERSION

if TYPE_CHECKING:
    from quire.server.cli.hosting import HttpServer

log = logging.getLogger(__name__)
WATCH_SECONDS = 0.5
INTERRUPTED = 130


def main(argv: Sequence[str], started: float) -> int:
    parser = argparse.ArgumentParser(
        prog="quire serve",
        usage="quire serve [MODEL] [--config FILE] [flags]",
        description="Serve a model behind the OpenAI API.",
        epilog="Each setting may also come from a QUIRE_* environment variable (--max-model-len: QUIRE_MAX_MODEL_LEN) "
        "or a TOML file (max_model_len = 4096); flags win over variables, variables over the file.",
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", metavar="MODEL", help="local directory or hub id; default: the embedded one")
    add_flags(parser, ServerConfig, {EngineConfig: "engine", ServerConfig: "server"})
    _, config = parse(parser, argv, ServerConfig, "name")
    logs.set_up(config)
    with bind(config.host, config.port) as listener:
        return uvloop.run(Service(config, listener, started).run())


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address but not listening: who connects before the model is loaded is refused.

    Raises ConfigError, naming the address, when it is taken or not ours.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or --host"
        ) from None
    return listener


class Service:
    """One run of the server: start, serve, drain. `run()` gives the exit status."""

    def __init__(self, config: ServerConfig, listener: socket.socket, started: float) -> None:
        self._config = config
        self._listener = listener
        self._started = started
        self._client = ProcessClient(config)
        self._server: HttpServer | None = None
        self._signals = 0
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> int:
        main_task = asyncio.current_task()
        assert main_task is not None
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
            numbers.append(signal.SIGHUP)
        for number in numbers:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number, main_task)
        machine = this_machine(gpu=self._config.device != "cpu")
        self._client.launch()
        try:
            hosting = await asyncio.to_thread(import_module, "quire.server.cli.hosting")
            async with hosting.running_app(self._config, self._client) as app:
                announce = partial(self._announce, app.state.runtime.info, machine)
                self._server = hosting.HttpServer(app, self._config, announce)
                return await self._serve(self._server)
        except asyncio.CancelledError:
            return 0
        finally:
            await self._client.stop()

    async def _serve(self, server: HttpServer) -> int:
        watcher = asyncio.create_task(self._watch(server))
        await server.serve(sockets=[self._listener])
        watcher.cancel()
        if not self._client.alive:
            raise EngineError("the engine ended and could not be brought back; see the log above")
        if server.force_exit:
            return INTERRUPTED
        return 0 if server.started else 1

    async def _watch(self, server: HttpServer) -> None:
        """A server whose engine is gone for good ends, so that whoever runs it can start it anew."""
        while self._client.alive:  # noqa: ASYNC110 - noticed soon enough
            await asyncio.sleep(WATCH_SECONDS)
        server.should_exit = True

    def _on_signal(self, number: signal.Signals, main_task: asyncio.Task[int]) -> None:
        if number == signal.SIGHUP and self._signals:
            return  # a terminal that closes sends more than one, and nobody asked for haste
        self._signals += 1
        if self._server is None:
            main_task.cancel()
        elif self._signals == 1:
            self._draining = asyncio.create_task(self._server.drain())
            if self._client.num_open:
                count, seconds = self._client.num_open, self._config.shutdown_timeout
                log.info("draining: %d open, at most %g s; Ctrl-C again ends them at once", count, seconds)
        else:
            self._server.force_exit = self._server.should_exit = True

    def _announce(self, info: EngineInfo, machine: Machine) -> None:
        host, port = self._listener.getsockname()[:2]
        planned = predicted_tokens(self._config, machine)
        seconds = time.perf_counter() - self._started
        base = url(host, port, tls=self._config.ssl_certfile is not None)
        print(announcement(self._config, info, base, seconds, planned), flush=True)
        gc.freeze()  # exempts what lives as long as the process from every later collection


def url(host: str, port: int, *, tls: bool = False) -> str:
    """Where to reach a server that listens there: a wildcard address is reached by this machine's own."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if tls else "http"
    return f"{scheme}://[{reachable}]:{port}" if ":" in reachable else f"{scheme}://{reachable}:{port}"


def announcement(config: ServerConfig, info: EngineInfo, base: str, seconds: float, planned: int | None = None) -> str:
    """What was loaded, how the memory is spent, and a first request to paste."""
    names = ", ".join(config.model_names)
    body = {"model": config.model_names[0], "prompt": "Once upon a time", "max_tokens": 100, "stream": True}
    weights = info.weight_bytes / 2**20
    plan = ""
    if planned:
        got = info.num_blocks * info.block_size
        plan = f"\n  plan       {planned:,} tokens of KV foreseen, {got:,} are there ({got / planned - 1:+.1%})"
    return f"""\
quire {VERSION}
  model      {names}: {info.dtype} on {info.device}, {weights:.1f} MiB loaded in {info.load_seconds:.1f} s
  attention  {info.backend}
  memory     {info.arithmetic}{plan}
  ready      {base} after {seconds:.1f} s; Ctrl-C ends it

curl -N {base}/v1/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'
"""
