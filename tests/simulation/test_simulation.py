"""Nothing accepted is lost, whatever ends when: the real store, streams, batches, request accounting and supervisor,
with clients, network, engine, disk and clock driven by one seed.

`pytest "tests/simulation/test_simulation.py::test_simulation_of_one_server_loses_nothing[17]"` runs one seed and prints
what happened when. Each bug found is planted in test_planted.py, because seeds may come to mean something else.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.engine.client.engine_process import Launcher
from quire.server.durability.data_dir import open_data_dir
from tests.server.api import NAME
from tests.simulation import clients
from tests.simulation.clock import PROCESS, virtual_time
from tests.simulation.engine import Alive, Computing, SimulatedProcess
from tests.simulation.replicas import Replicas
from tests.simulation.server import AppProcess, Connection, Program, ServerProcess
from tests.simulation.several import OfSeveral, SharedServer
from tests.simulation.wire import Network
from tests.tiers import slow

PACES = (1, 1, 1, 20)
"""Duration factors of engine steps. With the last one a stream is long enough for many faults."""
LONGEST = 600.0
"""Simulated seconds in which everything must have ended."""
KINDS = (clients.Streaming, clients.Streaming, clients.Streaming, clients.Whole, clients.InBackground, clients.Batching)
GIGABYTE = 1 << 30
Server = ServerProcess | SharedServer | Replicas


class World:
    """Successive servers in the same folder, their clients, and the faults that they meet."""

    def __init__(self, seed: int, folder: Path, programs: Sequence[Program], kind: type[Server]) -> None:
        """`programs`: of the processes that answer clients."""
        self._programs, self._kind = programs, kind
        self.rng = random.Random(seed)
        self.network = Network(self.rng)
        self._excused = self.upgraded = -1.0
        self.version = 0
        self._folder = folder
        self._number = 0
        self._engines: Alive = {}
        self._computing, self._pace = Computing(), self.rng.choice(PACES)
        self.seeds: dict[str, int] = {}
        self._server: Server | None = None
        self._up = asyncio.Event()
        self.told: list[str] = []
        self._crashes = 0
        self._faults = self.rng.choice((0, 1, 2, 3, 5, 8))

    @property
    def excused(self) -> float:
        if self._server is not None and self._server.disk.full:
            self._excuse()
        return self._excused

    def tell(self, what: str) -> None:
        self.told.append(f"{asyncio.get_running_loop().time():9.4f} {what}")

    async def connect(
        self, method: str, url: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Connection:
        while self._server is None or not self._server.answers:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        answering = self._server.answering
        process = answering[0] if len(answering) == 1 else self.rng.choice(answering)
        return Connection(process, self.rng, method, url, body, headers)

    async def run(self) -> None:
        (self._folder / "0").mkdir()
        await self._start()
        count = self.rng.choice((1, 2, 4))
        async with asyncio.timeout(LONGEST), asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(self.rng.choice(KINDS)(self, number).run())
            group.create_task(self._befall())
        late = max(self.network.late_until.values(), default=0.0) - asyncio.get_running_loop().time()
        await asyncio.sleep(10 + max(0.0, late))
        assert self._server is not None
        for each in self._server.answering:
            await self._use(each)
        await asyncio.sleep(3)
        self._check_rest()
        process = self._server.answering[0]
        assert process.server.persistence is not None
        looked = process.context.copy().run(asyncio.create_task, process.server.persistence.refresh_status())
        self._counted = (await looked).sizes
        await self._server.stop()
        self._check_kept()

    async def _use(self, process: AppProcess) -> None:
        """Whatever happened to the process, it answers and journals the answer."""
        body = {"model": NAME, "prompt": "once", "max_tokens": 3, "stream": True}
        connection = Connection(process, self.rng, "POST", "/v1/completions", json.dumps(body).encode())
        status, _, answer = await connection.whole()
        assert (status, answer[-14:]) == (200, b"data: [DONE]\n\n"), (status, answer)

    async def _start(self) -> None:
        self._server = self._kind(
            self._programs, self._path, self.rng, self._engines, self.network, Launcher(self.process)
        )
        while not self._server.answers:
            assert self._server.failure is None, self._server.failure
            await asyncio.sleep(0.05)

    @property
    def _path(self) -> Path:
        return self._folder / str(self._number)

    def process(self, _config: Any, on_begun: Any, _environment: Any) -> SimulatedProcess:
        engines = getattr(PROCESS.get(), "engines", self._engines)
        return SimulatedProcess(*(on_begun, self.rng, engines, self.seeds, self.version), self._computing, self._pace)

    async def _befall(self) -> None:
        """Cause all faults."""
        for _ in range(self._faults):
            await self._some_time()
            what = self.rng.choice(self._kind.FAULTS)
            if what == "crash" and self._crashes:  # a request that meets every crash is given up
                what = "engine"
            self._crashes += what == "crash"
            self.tell(what)
            match what:
                case "kill":
                    await self._end()
                case "power":
                    self._excuse()
                    await self._end(power=True)
                case "stop":
                    await self._restart()
                case "upgrade":
                    self.version += 1
                    self.upgraded = asyncio.get_running_loop().time()
                    await (self._restart() if self.rng.random() < 0.5 else self._end())
                case "engine":
                    self._end_engine(crash=False)
                case "crash":
                    self._end_engine(crash=True)
                case "full":
                    await self._fill()
                case "statement":
                    await self._end_in_statement()
                case _:
                    await self._befall_several(what)

    async def _befall_several(self, what: str) -> None:
        assert isinstance(self._server, OfSeveral)
        if what == "api":
            self._server.end_one()
        elif what == "late":
            self._server.delay_one()
        elif what == "readers":
            self._server.lose_readers()
        else:
            assert isinstance(self._server, Replicas)
            await self._server.end_owner()
            if self.rng.random() < 0.7:  # the next owner knows only what it is told of these answers
                self._server.lose_readers()

    async def _some_time(self) -> None:
        """Wait for a moment, or for some turns of the loop."""
        if self.rng.random() < 0.5:
            return await asyncio.sleep(4 * self.rng.random() ** 2)
        for _ in range(self.rng.randrange(1000)):
            await asyncio.sleep(0)

    def _excuse(self) -> None:
        self._excused = asyncio.get_running_loop().time()

    async def _end(self, *, power: bool = False) -> None:
        assert self._server is not None
        await self._server.kill(self._folder / str(self._number + 1), power=power)
        self._number += 1
        await asyncio.sleep(self.rng.choice((0.0, 0.5)))
        await self._start()

    async def _restart(self) -> None:
        assert self._server is not None
        await self._server.stop()
        await self._start()

    def _end_engine(self, *, crash: bool) -> None:
        assert self._server is not None
        for engine in list(self._server.engines):
            engine.crash() if crash else engine.exit()

    async def _fill(self) -> None:
        assert self._server is not None
        self._excuse()
        self._server.disk.full = True
        await asyncio.sleep(5 * self.rng.random())
        self._server.disk.full = False
        self._excuse()

    async def _end_in_statement(self) -> None:
        """Kill the server just before the database executes a statement."""
        server, reached = self._server, asyncio.Event()
        assert isinstance(server, ServerProcess | SharedServer)
        last = server.disk.statements + self.rng.randrange(1, 60)

        def end(statement: int) -> None:
            if statement >= last and not server.dead:
                server.die(self._folder / str(self._number + 1), power=False)
                reached.set()

        server.disk.at_statement = end
        try:
            await asyncio.wait_for(reached.wait(), 5)
        except TimeoutError:
            server.disk.at_statement = lambda statement: None
        else:
            await self._end()

    async def end(self) -> None:
        """Leave nothing running, also after a failure."""
        if self._server is not None:
            await self._server.kill(self._folder / "end")

    def _check_rest(self) -> None:
        """After the last client nothing runs and no capacity is held."""
        assert self._server is not None
        assert len(self._server.answering) == len(self._programs)
        for client in self._server.clients:
            assert client.alive
            assert not client.num_open, "a request goes on for nobody"
            assert not client.queued_tokens
            assert not client.open_by_tenant
        assert not any(engine.running for engine in self._server.engines)
        if not self.network.late_until:  # a process that hears nothing for long is not waited for
            assert not self._computing.wrong, f"two processes answered the same: {self._computing.wrong}"
        for process in self._server.answering:
            assert process.server.batch_runner is not None
            assert not process.server.batch_runner.num_running_batches
            assert process.server.resumable_calls is not None
            assert not process.server.resumable_calls.num_running, "a stream that has ended is still noted"

    def _check_kept(self) -> None:
        """The sizes that the last process counted are those on disk."""
        counted = self._counted
        kept = open_data_dir(self._path, GIGABYTE)
        try:
            assert counted == kept.processes.exchange_status("", {}).sizes
            assert not kept.store.unfinished_responses()
            assert not kept.batches.list_open_batches()
            for owner in kept.files.sizes:
                page = kept.files.page(owner, 10_000, newest_first=True, after=None, purpose=None)
                assert page is not None
                for file in page[0]:
                    size = kept.contents.content_path(file.id).stat().st_size
                    assert size == file.bytes, "a file is known without its content"
        finally:
            kept.close()


def simulate(seed: int, folder: Path, programs: Sequence[Program], kind: type[Server] = ServerProcess) -> list[str]:
    """Returns the log of what happened."""
    world = World(seed, folder, programs, kind)
    with virtual_time(random.Random(-seed)) as loop:
        loop.run_until_complete(_run(world))
    return [*world.told, f"{loop.selector.turns} turns"]


async def _run(world: World) -> None:
    try:
        await world.run()
    except BaseException:
        print("\n".join(world.told))
        raise
    finally:
        await world.end()


FOUND = (240, 1022)
"""Seeds outside of the daily range that found faults."""
KINDS_OF_SEVERAL = (SharedServer, Replicas)
FOUND_BY_SEVERAL = (
    (SharedServer, 85),
    (Replicas, 31),
    (Replicas, 40),
    (Replicas, 84),
    (Replicas, 631),
    (Replicas, 1406),
)


@pytest.mark.few(8)
@pytest.mark.parametrize("seed", [*range(30), *slow(*range(30, 200)), *FOUND])
def test_simulation_of_one_server_loses_nothing(seed: int, tmp_path: Path, program: Program) -> None:
    simulate(seed, tmp_path, [program])


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("kind", "seed"), [*((kind, seed) for kind in KINDS_OF_SEVERAL for seed in range(4)), *FOUND_BY_SEVERAL]
)
def test_simulation_of_several_processes_loses_nothing(
    kind: type[Server], seed: int, tmp_path: Path, api_programs: Sequence[Program]
) -> None:
    simulate(seed, tmp_path, api_programs, kind)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("hundred", range(2, 100))
def test_hundred_simulations_of_one_server_lose_nothing(hundred: int, tmp_path: Path, program: Program) -> None:
    _simulate_hundred(hundred, tmp_path, [program], ServerProcess)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("hundred", range(15))
@pytest.mark.parametrize("kind", KINDS_OF_SEVERAL)
def test_hundred_simulations_of_several_processes_lose_nothing(
    kind: type[Server], hundred: int, tmp_path: Path, api_programs: Sequence[Program]
) -> None:
    _simulate_hundred(hundred, tmp_path, api_programs, kind)


def _simulate_hundred(hundred: int, tmp_path: Path, programs: Sequence[Program], kind: type[Server]) -> None:
    for seed in range(100 * hundred, 100 * hundred + 100):
        (folder := tmp_path / str(seed)).mkdir()
        try:
            simulate(seed, folder, programs, kind)
        except BaseException:
            print(f"seed {seed}")
            raise
        shutil.rmtree(folder)
