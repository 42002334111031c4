"""Replicas as on Ray, each a server with its own engine, and the process that has all data, which may be replaced
meanwhile: the real Members and JournalLink of deploy/ray, over calls that are late and get lost.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Sequence
from contextvars import Context, copy_context
from pathlib import Path
from typing import Any, ClassVar

from fastapi import FastAPI

from deploy.ray.link import Call, JournalLink
from deploy.ray.members import Members
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_process import Launcher
from quire.engine.client.process_client import ProcessClient
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, Overloaded, QuireError
from tests.simulation.clock import PROCESS
from tests.simulation.disk import Disk, WithDisk, connect
from tests.simulation.engine import Alive
from tests.simulation.server import FAULTS, AppProcess, Program, end_tasks
from tests.simulation.several import OfSeveral
from tests.simulation.wire import Network

GIGABYTE = 1 << 30
LOST = Overloaded("The process that has data_dir ended. Please try again")


class RequestOwner(WithDisk):
    """The process that has the data."""

    def __init__(self, server: Replicas, disk: Disk) -> None:
        super().__init__()
        self.disk = disk
        self.members: Members | None = None
        """Once it answers."""
        self._server = server
        self._stopping, self.ended = asyncio.Event(), asyncio.Event()
        self.context = copy_context()
        self.context.run(PROCESS.set, self)
        self.task = self.context.run(asyncio.create_task, self._live())

    async def _live(self) -> None:
        await asyncio.sleep(self._server.rng.choice((0.0, 0.5, 2.0)))
        while self.members is None:
            try:
                self.members = Members(self.disk.folder, GIGABYTE, self._server.living, connect=connect)
            except ConfigError:  # the one before has not ended: Serve tries again
                await asyncio.sleep(0.5)
        await self._stopping.wait()
        await self.members.close()
        self.dead = True
        self.ended.set()

    async def stop(self) -> None:
        self._stopping.set()
        await self.ended.wait()

    async def die(self) -> None:
        if self.dead:
            return
        self.dead = True
        await end_tasks(self)
        if self.members is not None:
            self.members._data.close()  # as the kernel does
        self.ended.set()


class Replica(AppProcess):
    asks = True

    def __init__(self, server: Replicas, program: Program, identity: str) -> None:
        self.identity = identity
        self.engines: Alive = {}
        self._folder = program.data_dir
        self._link = JournalLink(identity, server.calling(identity))
        program.link.link = self._link
        self._client = EngineClient(ProcessClient(EngineConfig(), launcher=server.launcher))
        program.begin(server.disk.folder, self._client)
        super().__init__(program.app)

    async def _live(self, app: FastAPI) -> None:
        try:
            await self._link.begin(self._folder)
            self._client.engine_core.launch()
            await super()._live(app)
            await self._link.close()
        except (QuireError, sqlite3.OperationalError):  # it cannot start
            if self.dead:
                raise
            self.die()

    def die(self) -> None:
        if self.dead:
            return
        self.dead = True
        self.cut_off()
        for engine in list(self.engines):
            engine.exit()
        Context().run(asyncio.create_task, self._end())

    async def _end(self) -> None:
        await end_tasks(self)
        self.ended.set()


class Replicas(OfSeveral):
    """All replicas and the owner."""

    FAULTS: ClassVar = (
        "api",
        "api",
        "owner",
        "owner",
        "late",
        "readers",
        *(each for each in FAULTS if each != "statement"),
    )

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
        self.rng = rng
        self.launcher = launcher
        self.disk = Disk(folder, rng)
        self.failure: BaseException | None = None
        self.replicas: dict[int, Replica] = {}
        self._owner = RequestOwner(self, self.disk)
        self._stopping = False
        self._keeping = [
            Context().run(asyncio.create_task, self._keep(each, program)) for each, program in enumerate(programs)
        ]

    async def _keep(self, number: int, program: Program) -> None:
        while not (self.dead or self._stopping):
            name = f"replica{next(self.network.numbers)}"
            replica = self.replicas[number] = Context().run(Replica, self, program, name)
            await replica.ended.wait()
            await asyncio.sleep(self.rng.choice((0.1, 1.0)))

    def living(self) -> set[str]:
        return {each.identity for each in self.replicas.values() if not each.dead}

    def calling(self, identity: str) -> Call:
        async def call(method: str, *given: Any) -> Any:
            while (owner := self._owner).members is None or owner.dead:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await self._on_the_way(identity, owner)
            done = owner.context.copy().run(asyncio.create_task, getattr(owner.members, method)(*given))
            await asyncio.wait([done])
            if done.cancelled():
                raise LOST
            await self._on_the_way(identity, owner)
            return done.result()

        return call

    async def _on_the_way(self, identity: str, owner: RequestOwner) -> None:
        """Raises Overloaded where the call, or its answer, is lost."""
        await asyncio.sleep(self.rng.choice((0.0, 0.001, 0.02)))
        late = self.network.late_until.get(identity.encode(), 0.0) > asyncio.get_running_loop().time()
        if owner.dead or (late and self.rng.random() < 0.5):
            raise LOST

    @property
    def several(self) -> list[Replica]:
        return list(self.replicas.values())

    @property
    def engines(self) -> Alive:
        return {engine: None for each in self.replicas.values() for engine in each.engines}

    @property
    def clients(self) -> list[EngineClient]:
        return [each.runtime.client for each in self.answering]

    async def end_owner(self) -> None:
        """Until another one answers."""
        before, self._owner = self._owner, Context().run(RequestOwner, self, self.disk)
        await before.die()
        while not (self.dead or self._owner.dead) and self._owner.members is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        self._stopping = True
        for each in self.several:
            each.ask_to_stop()
        for each in self.several:
            await each.ended.wait()
        await self._owner.stop()
        self.dead = True

    async def kill(self, folder: Path, *, power: bool = False) -> None:
        if not self.dead:
            self.disk.left(folder, power=power)
            self.dead = True
            for each in self.several:
                each.die()
        await self._owner.die()
        for each in self.several:
            await each.ended.wait()
        for task in self._keeping:
            task.cancel()
