"""An engine process without a model: computes letters from one seed, slowly and unevenly, and can be killed."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quire.engine.client.engine_process import EngineProcess
from quire.engine.client.messages import Abort, FromEngine, Stepped, Submit, ToEngine, attach_images
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest
from quire.engine.core.stats import EngineStats
from quire.engine.processes.exit_cause import ExitCause
from tests.engine.fake_process import CRASHED, INFO, KILLED, started

LETTERS = b"abcdefghijklmnopqrstuvwxyz "
CONTEXT = 2048
ENGINE = msgspec.structs.replace(INFO, max_model_len=CONTEXT, num_blocks=1000, deterministic=True)


def letter(seed: int, before: bytes, version: int) -> int:
    """What follows `before`: by its length and its last letter."""
    digest = hashlib.blake2b(f"{seed} {len(before)} {before[-1:]!r} {version}".encode(), digest_size=4).digest()
    return LETTERS[int.from_bytes(digest, "big") % len(LETTERS)]


def is_answer(text: bytes, seed: int, newest: int) -> bool:
    """Whether it is what a request with this seed is answered, by one version after another up to the newest."""
    version = 0
    for place, each in enumerate(text):
        while letter(seed, text[:place], version) != each:
            version += 1
            if version > newest:
                return False
    return True


class Computing:
    """Calls that all engines compute at the moment. If two compute one for long, two processes answer it, although one
    should have ended when the other took over.
    """

    PATIENCE = 1.0
    """Seconds in which an end reaches its engine."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        """The calls of which this was so."""
        self._engines: dict[str, dict[tuple[SimulatedProcess, str], None]] = {}
        """By the id of a call's choice: the engines that compute it, and by which id."""
        self._twice: dict[str, float] = {}
        """By the same: since when two do."""

    def begin(self, engine: SimulatedProcess, id: str) -> None:
        of_choice = self._engines.setdefault(id.partition(".")[0], {})
        of_choice[engine, id] = None
        if len(of_choice) == 2:
            self._twice.setdefault(id.partition(".")[0], asyncio.get_running_loop().time())

    def end(self, engine: SimulatedProcess, id: str) -> None:
        choice = id.partition(".")[0]
        of_choice = self._engines[choice]
        del of_choice[engine, id]
        if len(of_choice) == 1 and asyncio.get_running_loop().time() - self._twice.pop(choice) > self.PATIENCE:
            self.wrong.append(choice)
        if not of_choice:
            del self._engines[choice]


class SimulatedProcess(EngineProcess):
    """Messages arrive late but in order; those in flight when it ends are lost."""

    def __init__(
        self,
        on_begun: Callable[[Sequence[str]], None],
        rng: random.Random,
        alive: Alive,
        seeds: dict[str, int],
        version: int,
        computing: Computing,
        pace: float,
    ) -> None:
        """`seeds`: those of all requests, of earlier processes too, by id without the number of the attempt. `pace`: a
        step takes so many times as long."""
        self._rng = rng
        self._computing = computing
        self._pace = pace
        self._alive = alive
        self._seeds = seeds
        self._version = version
        self._begun_by = on_begun
        loop = asyncio.get_running_loop()
        self._to_engine: asyncio.Queue[ToEngine] = asyncio.Queue()
        self._from_engine: asyncio.Queue[FromEngine] = asyncio.Queue()
        self._exit: asyncio.Future[ExitCause] = loop.create_future()
        self.running: dict[str, tuple[EngineCoreRequest, list[int]]] = {}
        """Requests, and the tokens that each has."""
        self._stderr_lines: Any = []
        self._task: asyncio.Task[None] | None = None
        alive[self] = None

    @property
    def is_connected(self) -> bool:
        return self._task is not None

    @property
    def pid(self) -> int:
        return 1

    @property
    def silence(self) -> float:
        return 0.0

    def connect(self) -> None:
        self._task = asyncio.create_task(self._run())

    def send(self, message: ToEngine) -> None:
        if not self._exit.done():
            self._to_engine.put_nowait(message)

    async def receive(self) -> FromEngine:
        return await self._from_engine.get()

    async def _run(self) -> None:
        await asyncio.sleep(self._rng.choice((0.0, 0.1, 2.0)))
        self._from_engine.put_nowait(started(msgspec.structs.replace(ENGINE, code=str(self._version))))
        while True:
            if not self.running:
                self._take(await self._to_engine.get())
            await asyncio.sleep(self._pace * self._rng.choice((0.001, 0.005, 0.02)))
            while not self._to_engine.empty():
                self._take(self._to_engine.get_nowait())
            if outputs := [self._step(each) for each in list(self.running)]:
                message = Stepped(outputs, EngineStats(running=len(self.running)))
                asyncio.get_running_loop().call_soon(self._arrive, message)

    def _arrive(self, message: FromEngine) -> None:
        if not self._exit.done():
            self._from_engine.put_nowait(message)

    def _take(self, message: ToEngine) -> None:
        match message:
            case Submit(requests, images):
                for request in attach_images(requests, images):
                    assert request.id not in self.running, "it was sent twice"
                    known = bytes(request.emitted_ids)
                    assert is_answer(known, request.seed, self._version), "what it has is not what it was given"
                    seed = self._seeds.setdefault(request.id.partition(".")[0], request.seed)
                    assert seed == request.seed, "it is made again with another seed"
                    self.running[request.id] = request, list(request.emitted_ids)
                    self._computing.begin(self, request.id)
                self._begun_by([request.id for request in requests])
            case Abort(ids):
                for id in ids:
                    if id in self.running:
                        self._end(id)

    def _end(self, id: str) -> None:
        del self.running[id]
        self._computing.end(self, id)

    def _step(self, id: str) -> EngineCoreOutput:
        """One token, or more at once, as drafts give."""
        request, had = self.running[id]
        most = request.params.max_tokens or CONTEXT
        ids: list[int] = []
        for _ in range(min(most - len(had), self._rng.choice((1, 1, 1, 3)))):
            ids.append(letter(request.seed, bytes([*had, *ids]), self._version))
        had += ids
        reason = None
        if len(had) >= most:
            reason = "length"
            self._end(id)
        return EngineCoreOutput(id, ids, finish_reason=reason, cached_tokens=len(had) % 5)

    def exit(self, cause: ExitCause = KILLED) -> None:
        self._alive.pop(self, None)
        for id in list(self.running):
            self._end(id)
        if self._task is not None:
            self._task.cancel()
        if not self._exit.done():
            self._exit.set_result(cause)

    def crash(self) -> None:
        self.exit(CRASHED)

    async def wait_for_exit(self) -> ExitCause:
        return await asyncio.shield(self._exit)

    async def wait_until_ended(self, exited: asyncio.Task[ExitCause], seconds: float) -> None:
        await asyncio.wait([exited])

    def end(self) -> None:
        self.exit()

    async def stop(self) -> None:
        self.exit()

    def close(self) -> None:
        assert self._exit.done()


Alive = dict[SimulatedProcess, None]
"""The engine processes that have not ended."""
