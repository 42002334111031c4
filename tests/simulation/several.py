"""A server of several API processes: the real parent command, leader and links, over simulated sockets."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, copy_context
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from fastapi import FastAPI

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_process import Launcher
from quire.engine.client.process_client import ProcessClient
from quire.engine.client.shared_client import SharedClient
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import QuireError
from quire.server.cli.api_process_manager import ApiProcessManager, ApiProcessSetup, ManagerDependencies
from quire.server.config import ServerConfig
from quire.server.durability.write_ahead_log import LOG_FILE_PREFIX
from tests.server.api import NAME
from tests.simulation.clock import PROCESS, Gone
from tests.simulation.disk import Disk, WithDisk, connect
from tests.simulation.engine import Alive
from tests.simulation.server import FAULTS, AppProcess, Program, end_tasks
from tests.simulation.wire import Network, SimulatedWire

KILLED = -signal.SIGKILL


class CurrentLink:
    """Replaces the link of the API process that is running."""

    link: SharedClient

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)


def programs(folder: Path, number: int) -> list[Program]:
    """Those of so many API processes."""
    made = []
    for each in range(number):
        (own := folder / str(each)).mkdir()
        made.append(Program(own, link=CurrentLink()))
    return made


class ApiProcess(AppProcess):
    asks = True

    def __init__(self, program: Program, folder: Path, setup: ApiProcessSetup, network: Network) -> None:
        self.identity = setup.identity
        self._tail = folder / f"{LOG_FILE_PREFIX}{setup.identity}"
        self._link = SharedClient(EngineConfig(), setup.hub, setup.identity, wires(network))
        self._link.on_failure = partial(self.die, 1)
        program.link.link = self._link
        program.begin(folder, EngineClient(self._link))
        self.code = 0
        super().__init__(program.app)

    async def _live(self, app: FastAPI) -> None:
        self._link.launch()
        try:
            await super()._live(app)
        except (QuireError, sqlite3.OperationalError):  # it cannot start
            if self.dead:
                raise
            self.die(1)

    def _serves(self) -> None:
        self._link.tell_serving("serving")

    def die(self, code: int = KILLED) -> None:
        """From this moment on it does nothing that anybody sees."""
        if self.dead:
            return
        self.dead, self.code = True, code
        self.cut_off()
        left = self._tail.read_bytes() if self._tail.exists() else None
        Context().run(asyncio.create_task, self._end(left))

    async def _end(self, left: bytes | None) -> None:
        await end_tasks(self)
        if left is not None:  # whatever its tasks did when they were cancelled
            self._tail.unlink(missing_ok=True)
            self._tail.write_bytes(left)
        self.ended.set()


class _Child:
    """Replaces Child."""

    def __init__(self, arguments: Sequence[str], configuration: bytes) -> None:
        server = PROCESS.get()
        assert isinstance(server, SharedServer)
        if server.dead:
            raise Gone
        self._api = server.begin(msgspec.json.decode(configuration, type=ApiProcessSetup))
        self.process = self
        self.pid = os.getpid()

    def send_signal(self, number: int) -> None:
        assert number == signal.SIGTERM
        self._api.ask_to_stop()

    def kill(self) -> None:
        self._api.die()

    async def stop(self, seconds: float) -> None:
        self.kill()
        await self.wait_for_exit()

    async def wait_for_exit(self) -> int:
        await self._api.ended.wait()
        return self._api.code


class _Listener:
    family = 2

    def getsockname(self) -> tuple[str, int]:
        return ("127.0.0.1", 8000)


class _Sockets:
    numbers = count()

    def __init__(self) -> None:
        self.hub = next(self.numbers)

    def close(self) -> None:
        pass


class OfSeveral(WithDisk, ABC):
    """Several processes answer its clients."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    @property
    @abstractmethod
    def several(self) -> Sequence[Any]:
        """These processes; those too that have ended, until others took their places."""

    @property
    def answers(self) -> bool:
        return bool(self.answering)

    @property
    def answering(self) -> list[AppProcess]:
        return [] if self.dead else [each for each in self.several if each.answers]

    def end_one(self) -> None:
        self._one().die()

    def delay_one(self) -> None:
        until = asyncio.get_running_loop().time() + self.network.rng.choice((1.0, 15.0, 15.0))
        self.network.late_until[self._one().identity.encode()] = until

    def lose_readers(self) -> None:
        """Whoever reads loses the connection, which the process at its other end notices late or never."""
        for each in self.answering:
            for connection in list(each.connections):
                connection.leave()

    def _one(self) -> Any:
        """One of the processes; most often one that answers a stream."""
        busy = [each for each in self.answering if each.connections]
        return self.network.rng.choice(busy if busy and self.network.rng.random() < 0.8 else self.several)


class SharedServer(OfSeveral):
    """The process with engine and data. Its API processes end with it."""

    FAULTS: ClassVar = ("api", "api", "api", "late", "late", "readers", "readers", *FAULTS)

    def __init__(
        self,
        programs: Sequence[Program],
        folder: Path,
        rng: random.Random,
        engines: Alive,
        network: Network,
        launcher: Launcher,
    ) -> None:
        super().__init__(network)
        self.disk = Disk(folder, rng)
        self.engines = engines
        self.apis: dict[int, ApiProcess] = {}
        """By number: those that were started last."""
        self.on_signal: Callable[[int], None]
        self._programs = programs
        self._folder = folder
        config = ServerConfig(served_model_name=[NAME], data_dir=folder, api_server_count=len(programs))
        context = copy_context()
        context.run(PROCESS.set, self)
        self._client = EngineClient(ProcessClient(EngineConfig(), launcher=launcher))
        system = simulated(network, self._client)
        self._processes = context.run(ApiProcessManager, config, _Listener(), 0.0, system)  # type: ignore[arg-type]
        self.task = context.run(asyncio.create_task, self._live())

    async def _live(self) -> None:
        await self._processes.run()
        self.dead = True

    def begin(self, setup: ApiProcessSetup) -> ApiProcess:
        number = int(setup.identity.partition(".")[0])
        api = self.apis[number] = Context().run(ApiProcess, self._programs[number], self._folder, setup, self.network)
        return api

    @property
    def several(self) -> list[ApiProcess]:
        return list(self.apis.values())

    @property
    def clients(self) -> list[EngineClient]:
        return [self._client, *(each.runtime.client for each in self.answering)]

    @property
    def failure(self) -> BaseException | None:
        return self.task.exception() if self.task.done() else None

    async def stop(self) -> None:
        self.on_signal(signal.SIGTERM)
        await asyncio.wait([self.task])
        self.task.result()

    async def kill(self, folder: Path, *, power: bool = False) -> None:
        if not self.dead:
            self.die(folder, power=power)
        await end_tasks(self)
        for each in self.apis.values():
            await each.ended.wait()

    def die(self, folder: Path, *, power: bool) -> None:
        """The API processes end at the same moment: the kernel sees to it."""
        self.disk.left(folder, power=power)
        self.dead = True
        for each in self.apis.values():
            each.die()
        for engine in list(self.engines):
            engine.exit()


def wires(network: Network) -> Any:
    """What stands for the class Wire."""
    return partial(SimulatedWire, network)


def simulated(network: Network, client: EngineClient) -> ManagerDependencies:
    """What stands for the machine's processes and sockets. `client`: of the engine."""
    child: Any = _Child
    sockets: Any = _Sockets
    return ManagerDependencies(lambda config: client, child, sockets, wires(network), _hand_over_signals, connect)


@contextmanager
def _hand_over_signals(loop: asyncio.AbstractEventLoop, on_signal: Callable[[int], None]) -> Iterator[None]:
    server = PROCESS.get()
    assert isinstance(server, SharedServer)
    server.on_signal = on_signal
    yield
