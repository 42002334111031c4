"""`quire serve --api-server-count N`: supervises the engines and the API processes. Each API process listens on its own
socket (SO_REUSEPORT), so that after its end connections go to the other processes. This process's socket reserves the
port and never listens.
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

from quire.engine.client.api_server_leader import ApiServerLeader
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.relay import ApiProcessChannel
from quire.engine.client.replicated_client import processes
from quire.engine.common.errors import ConfigError, EngineError
from quire.engine.processes.child import Child, module
from quire.engine.processes.exit_cause import exit_cause
from quire.engine.processes.procfs import Stopped, WatchTimer
from quire.engine.processes.socket_folder import SocketFolder
from quire.engine.processes.wire import Wire
from quire.server.access.tenants import Tenants
from quire.server.cli.process_setup import INTERRUPTED_STATUS, WatchSignals, watch_signals
from quire.server.config import ServerConfig
from quire.server.durability.data_dir import DataDir, open_data_dir
from quire.server.durability.data_dir_rpc import DATA_DIR_TOPIC, serve_data_dir_call_in_thread
from quire.server.store.database import SQLiteConnect
from quire.server.store.sweeper import SECONDS_PER_DAY

log = logging.getLogger("quire.server")
MAX_FAILURES = 3
"""The server ends after this many processes in a row have ended before they served."""
_CHECK_SECONDS = 0.5
_SILENCE_SECONDS = 60.0
_STOPPED_SECONDS = 10.0
_FAILURE_MESSAGE_SECONDS = 0.2
_BACKOFF_SECONDS = 0.5


class ApiProcessSetup(msgspec.Struct, frozen=True):
    """The manager sends a setup to each API process's stdin, as one line of JSON."""

    config: str
    hub: str
    identity: str
    family: int
    address: tuple[Any, ...]
    started: float
    """time.perf_counter() at the command's start."""
    descriptor: int | None = None
    """File descriptor of the shared Unix socket. If None, the process binds `address`."""


def check_multi_process_settings(config: ServerConfig, models: Path | None) -> None:
    """Raises ConfigError."""
    unshareable = {
        "models": models is not None,
        "enable_lora": config.enable_lora,
        "requests_per_minute": config.requests_per_minute is not None,
        "tokens_per_minute": config.tokens_per_minute is not None,
        "api_key_file": any(tenant.limits.has_limits for tenant in Tenants(config).keyed_tenants),
    }
    for name in (name for name, is_set in unshareable.items() if is_set):
        what = "with limits a minute " if name == "api_key_file" else ""
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{name}: {flag} {what}needs --api-server-count 1, not {config.api_server_count}", param=name)
    if config.uds is None and not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError("api_server_count: this system has no SO_REUSEPORT, by which processes share a port")


@dataclass(frozen=True, slots=True)
class ManagerDependencies:
    create_client: Callable[[ServerConfig], EngineClient] = processes
    launch_process: Callable[[Sequence[str], bytes], Child] = Child
    create_socket_folder: Callable[[], SocketFolder] = SocketFolder
    create_wire: Callable[..., Wire] = Wire
    signal_watcher: WatchSignals = watch_signals
    connect_database: SQLiteConnect | None = None


class ApiProcessManager:
    def __init__(
        self,
        config: ServerConfig,
        listener: socket.socket,
        started: float,
        dependencies: ManagerDependencies = ManagerDependencies(),
    ) -> None:
        """`config` must have passed `check_multi_process_settings`."""
        self._config = config
        self._dependencies = dependencies
        self._listener = listener
        self._started = started
        self._client = dependencies.create_client(config)
        self._data: DataDir | None = None
        self._processes: dict[int, Child] = {}
        self._hub_address = ""
        self._is_ready = False
        self._num_signals = 0
        self.end_signal = ""

    @property
    def was_ready(self) -> bool:
        return self._is_ready

    async def run(self) -> int:
        """Returns the exit status. Raises ConfigError or EngineError if MAX_FAILURES processes in a row end before they
        serve, or one fails before the server is ready.
        """
        main_task = asyncio.current_task()
        assert main_task is not None
        folder = self._config.data_dir
        if folder is not None:
            retention = self._config.response_retention_days * SECONDS_PER_DAY
            size, connect = int(self._config.max_stored_size * 2**30), self._dependencies.connect_database
            self._data = open_data_dir(folder, size, retention_seconds=retention, connect=connect)
        with self._dependencies.signal_watcher(asyncio.get_running_loop(), partial(self._on_signal, main_task)):
            self._client.engine_core.launch()
            try:
                with closing(self._dependencies.create_socket_folder()) as sockets:
                    self._hub_address = f"ipc://{sockets.hub}"
                    hub = ApiServerLeader(self._client, self._hub_address, self._dependencies.create_wire)
                    hub.answering.add(DATA_DIR_TOPIC, self._answer_data_dir_call)
                    return await self._run_processes(hub)
            except asyncio.CancelledError:
                return 0
            finally:
                await self._client.engine_core.stop()
                if self._data is not None:
                    self._data.close()

    async def _answer_data_dir_call(self, body: bytes) -> bytes:
        assert self._data is not None
        return await serve_data_dir_call_in_thread(self._data, body)

    async def _run_processes(self, hub: ApiServerLeader) -> int:
        keep_tasks = [
            asyncio.create_task(self._keep_process_running(hub, number))
            for number in range(self._config.api_server_count)
        ]
        start_task = asyncio.create_task(self._announce_when_ready(hub))
        try:
            hub.listen()
            done, _ = await asyncio.wait([start_task, *keep_tasks], return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            codes = [task.result() for task in keep_tasks]
        finally:
            for task in (start_task, *keep_tasks):
                task.cancel()
            await asyncio.gather(start_task, *keep_tasks, return_exceptions=True)
            for process in self._processes.values():
                await process.stop(0.0)
            await hub.close()
        if not self._client.alive:
            raise EngineError("the engine ended and could not be restarted; see the log above")
        if INTERRUPTED_STATUS in codes:
            return INTERRUPTED_STATUS
        return 0 if all(code in (0, -signal.SIGTERM) for code in codes) else 1

    async def _announce_when_ready(self, hub: ApiServerLeader) -> None:
        hub.ready(await self._client.engine_core.start())
        texts: list[str] = []
        while len(texts) < self._config.api_server_count:
            await hub.changed.wait()
            texts = [each.announcement for each in hub.channels if each.announcement is not None]
        self._is_ready = True
        with suppress(OSError):  # stdout may be closed or full
            print(texts[0], flush=True)

    async def _keep_process_running(self, hub: ApiServerLeader, number: int) -> int:
        failures = generation = 0
        while True:
            identity, generation = f"{number}.{generation}", generation + 1
            channel = hub.add(identity.encode(), number)
            process = self._processes[number] = self._spawn_process(identity)
            code = await self._wait_for_exit_or_kill_hung(process, channel)
            await asyncio.sleep(_FAILURE_MESSAGE_SECONDS)
            if self._data is not None:  # first, so that waiting clients find all the process's answers
                await asyncio.to_thread(self._data.processes.remove_process, identity)
            aborted = hub.remove(identity.encode())
            if self._num_signals or not self._client.alive:
                return code
            failures = 0 if channel.announcement is not None else failures + 1
            cause = exit_cause(code, sender=None, oom_kills=None).description
            if channel.fault is not None and (failures == MAX_FAILURES or not self._is_ready):
                raise channel.fault.error()
            if failures == MAX_FAILURES:
                raise EngineError(f"API process {number} {cause} before it served, {failures} times in a row")
            what = "API process %d %s; its %d open requests were aborted, and another process starts"
            log.warning(what, number, cause, aborted)
            await asyncio.sleep(_BACKOFF_SECONDS * failures)

    def _spawn_process(self, identity: str) -> Child:
        is_unix = self._listener.family == socket.AF_UNIX
        descriptor = self._listener.fileno() if is_unix else None
        setup = ApiProcessSetup(
            config=self._config.model_dump_json(exclude_unset=True),
            hub=self._hub_address,
            identity=identity,
            family=self._listener.family,
            address=() if is_unix else self._listener.getsockname(),
            started=self._started,
            descriptor=descriptor,
        )
        launch: Callable[..., Child] = self._dependencies.launch_process
        if descriptor is not None:
            launch = partial(launch, descriptors=[descriptor])
        return launch(module("quire.server.cli.api_process"), msgspec.json.encode(setup))

    async def _wait_for_exit_or_kill_hung(self, process: Child, channel: ApiProcessChannel) -> int:
        exited = asyncio.create_task(process.wait_for_exit())
        stopped, timer = Stopped(), WatchTimer(_CHECK_SECONDS)
        try:
            while not exited.done():
                await asyncio.wait([exited], timeout=_CHECK_SECONDS)
                silent = channel.silence if channel.welcomed else 0.0
                seconds = stopped.advance(process.pid, timer.measure_elapsed())
                if (silent > _SILENCE_SECONDS or seconds > _STOPPED_SECONDS) and not exited.done():
                    log.error("API process %d sent no heartbeat for %g s", channel.number, max(silent, seconds))
                    process.kill()
        finally:
            exited.cancel()
        return exited.result()

    def _on_signal(self, main_task: asyncio.Task[int], number: int) -> None:
        if number == signal.SIGHUP and self._num_signals:
            return  # a closing terminal may send several signals
        self._num_signals += 1
        self.end_signal = self.end_signal or signal.Signals(number).name
        if not self._is_ready:
            if self._num_signals > 1:
                os._exit(INTERRUPTED_STATUS)
            main_task.cancel()
            return
        if self._num_signals == 1 and self._client.num_open:
            count, seconds = self._client.num_open, self._config.shutdown_timeout
            log.info("draining: %d open, at most %g s; Ctrl-C again ends them at once", count, seconds)
        for process in self._processes.values():
            process.process.send_signal(signal.SIGTERM)
