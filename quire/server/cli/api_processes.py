"""`quire serve --api-server-count N`: N API processes listen on one port and share the engines. This process has the
engines' supervisor, starts the API processes and replaces those that end; it serves nothing itself.

Each API process has a listening socket of its own for the port (SO_REUSEPORT), so that connections go to
the others as soon as one has ended. The socket that this process bound never listens: it keeps the port from others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from quire.engine.errors import ConfigError, EngineError
from quire.engine.link.client import EngineClient
from quire.engine.link.hub import Hub
from quire.engine.link.hub_messages import NotStarted, Serving
from quire.engine.link.hub_relay import Channel
from quire.engine.processes.child import Child, module
from quire.engine.processes.exit_cause import exit_cause
from quire.engine.processes.procfs import Stopped
from quire.engine.processes.socket_folder import SocketFolder
from quire.engine.processes.wire import Wire
from quire.engine.replicas.replicas import processes
from quire.server.access.tenants import Tenants
from quire.server.cli.environment import INTERRUPTED, SignalsTold, signals_told
from quire.server.config import ServerConfig
from quire.server.store.data import Data, open_data
from quire.server.store.database import Connect
from quire.server.store.shared import TOPIC, answer_in_thread
from quire.server.store.sweeper import DAY

log = logging.getLogger("quire.server")
MOST_FAILURES = 3
"""API processes of one number in a row that may end without having served; with the last one the server ends."""
_CHECK_SECONDS = 0.5
_SILENCE_SECONDS = 60.0
"""An API process that gives no sign of life for so long is killed, and replaced."""
_STOPPED_SECONDS = 10.0
"""So is one that is stopped for so long."""
_LAST_WORDS_SECONDS = 0.2
"""How long the message may take with which an API process says why it ends."""
_BACKOFF_SECONDS = 0.5


class Setup(msgspec.Struct, frozen=True):
    """What an API process is told, as a line of JSON on its standard input."""

    config: str
    """A ServerConfig as JSON."""
    hub: str
    identity: str
    family: int
    address: tuple[Any, ...]
    """To listen on, as the socket module writes it."""
    started: float
    """When the command began, by time.perf_counter()."""


def check(config: ServerConfig, models: Path | None) -> None:
    """Raise ConfigError for what several API processes cannot serve, because each would know a part of it. `models`:
    the file of --models."""
    alone = {
        "models": models is not None,
        "enable_lora": config.enable_lora,
        "requests_per_minute": config.requests_per_minute is not None,
        "tokens_per_minute": config.tokens_per_minute is not None,
        "api_key_file": any(tenant.limits.limited for tenant in Tenants(config).all),
    }
    for name in (name for name, given in alone.items() if given):
        what = "with limits a minute " if name == "api_key_file" else ""
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{name}: {flag} {what}needs --api-server-count 1, not {config.api_server_count}", param=name)
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError("api_server_count: this system has no SO_REUSEPORT, by which processes share a port")


@dataclass(frozen=True, slots=True)
class OperatingSystem:
    """What these processes have of it."""

    engines: Callable[[ServerConfig], EngineClient] = processes
    launch: Callable[[Sequence[str], bytes], Child] = Child
    """Starts an API process."""
    sockets: Callable[[], SocketFolder] = SocketFolder
    wire: Callable[..., Wire] = Wire
    signals: SignalsTold = signals_told
    connect: Connect | None = None
    """See Database."""


class ApiProcesses:
    """One run of the server: start, serve, drain. `run()` returns the exit status."""

    def __init__(
        self, config: ServerConfig, listener: socket.socket, started: float, system: OperatingSystem = OperatingSystem()
    ) -> None:
        """Of a configuration that `check` lets through."""
        self._config = config
        self._system = system
        self._listener = listener
        self._started = started
        self._client = system.engines(config)
        self._data: Data | None = None
        """What API processes keep, which ask for it here."""
        self._processes: dict[int, Child] = {}
        self._hub_address = ""
        self._ready = False
        self._signals = 0
        self.ended_by = ""
        """The name of the first signal."""

    @property
    def was_ready(self) -> bool:
        return self._ready

    async def run(self) -> int:
        main_task = asyncio.current_task()
        assert main_task is not None
        folder = self._config.data_dir
        if folder is not None:
            retention = self._config.response_retention_days * DAY
            size, connect = int(self._config.max_stored_size * 2**30), self._system.connect
            self._data = open_data(folder, size, retention=retention, connect=connect)
        with self._system.signals(partial(self._on_signal, main_task)):
            self._client.link.launch()
            try:
                with closing(self._system.sockets()) as sockets:
                    self._hub_address = f"ipc://{sockets.hub}"
                    hub = Hub(self._client, self._hub_address, self._system.wire)
                    hub.answering.add(TOPIC, self._asked)
                    return await self._serve(hub)
            except asyncio.CancelledError:
                return 0
            finally:
                await self._client.link.stop()
                if self._data is not None:
                    self._data.close()

    async def _asked(self, body: bytes) -> bytes:
        """What an API process asks of what is kept."""
        assert self._data is not None
        return await answer_in_thread(self._data, body)

    async def _serve(self, hub: Hub) -> int:
        keeping = [asyncio.create_task(self._keep(hub, number)) for number in range(self._config.api_server_count)]
        starting = asyncio.create_task(self._start(hub))
        try:
            hub.listen()
            done, _ = await asyncio.wait([starting, *keeping], return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            codes = [task.result() for task in keeping]
        finally:
            for task in (starting, *keeping):
                task.cancel()
            await asyncio.gather(starting, *keeping, return_exceptions=True)
            for process in self._processes.values():
                await process.kill()
            await hub.close()
        if not self._client.alive:
            raise EngineError("the engine ended and could not be brought back; see the log above")
        if INTERRUPTED in codes:
            return INTERRUPTED
        return 0 if all(code in (0, -signal.SIGTERM) for code in codes) else 1

    async def _start(self, hub: Hub) -> None:
        """Wait for the engine and for all API processes, and say so."""
        hub.ready(await self._client.link.start())
        texts: list[str] = []
        while len(texts) < self._config.api_server_count:
            await hub.changed.wait()
            texts = [each.started.announcement for each in hub.channels if isinstance(each.started, Serving)]
        self._ready = True
        with suppress(OSError):  # the output may be closed or full, which is no reason not to serve
            print(texts[0], flush=True)

    async def _keep(self, hub: Hub, number: int) -> int:
        """Have an API process of this number, until the server ends. Returns the last one's return code; raises
        ConfigError or EngineError when too many in a row cannot serve."""
        failures = generation = 0
        while True:
            identity, generation = f"{number}.{generation}", generation + 1
            channel = hub.add(identity.encode(), number)
            process = self._processes[number] = self._spawn(identity)
            code = await self._watched(process, channel)
            await asyncio.sleep(_LAST_WORDS_SECONDS)
            if self._data is not None:  # first: who waits for its answer then finds all that it had
                await asyncio.to_thread(self._data.processes.gone, identity)
            aborted = hub.remove(identity.encode())
            if self._signals or not self._client.alive:
                return code
            failures = 0 if isinstance(channel.started, Serving) else failures + 1
            said = exit_cause(code, sender=None, oom_kills=None).description
            if isinstance(channel.started, NotStarted) and (failures == MOST_FAILURES or not self._ready):
                raise channel.started.fault.error()
            if failures == MOST_FAILURES:
                raise EngineError(f"API process {number} {said} before it served, {failures} times in a row")
            what = "API process %d %s; its %d open requests were aborted, and another process starts"
            log.warning(what, number, said, aborted)
            await asyncio.sleep(_BACKOFF_SECONDS * failures)

    def _spawn(self, identity: str) -> Child:
        setup = Setup(
            config=self._config.model_dump_json(exclude_unset=True),
            hub=self._hub_address,
            identity=identity,
            family=self._listener.family,
            address=self._listener.getsockname(),
            started=self._started,
        )
        return self._system.launch(module("quire.server.cli.api_process"), msgspec.json.encode(setup))

    async def _watched(self, process: Child, channel: Channel) -> int:
        """The return code of a process, which is killed when it hangs."""
        exited = asyncio.create_task(process.exited())
        stopped = Stopped()
        try:
            while not exited.done():
                await asyncio.wait([exited], timeout=_CHECK_SECONDS)
                silent = channel.silence if channel.welcomed else 0.0
                seconds = stopped.advance(process.pid, _CHECK_SECONDS)
                if (silent > _SILENCE_SECONDS or seconds > _STOPPED_SECONDS) and not exited.done():
                    log.error("API process %d gave no sign of life for %g s", channel.number, max(silent, seconds))
                    process.process.kill()
        finally:
            exited.cancel()
        return exited.result()

    def _on_signal(self, main_task: asyncio.Task[int], number: int) -> None:
        if number == signal.SIGHUP and self._signals:
            return  # a closing terminal may send several; only a repeated Ctrl-C or SIGTERM means haste
        self._signals += 1
        self.ended_by = self.ended_by or signal.Signals(number).name
        if not self._ready:
            if self._signals > 1:
                os._exit(INTERRUPTED)  # engines and API processes end with this process
            main_task.cancel()
            return
        if self._signals == 1 and self._client.num_open:
            count, seconds = self._client.num_open, self._config.shutdown_timeout
            log.info("draining: %d open, at most %g s; Ctrl-C again ends them at once", count, seconds)
        for process in self._processes.values():
            process.process.send_signal(signal.SIGTERM)
