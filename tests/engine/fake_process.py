"""Fake engine processes, and callers that read their outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_process import EngineProcess
from quire.engine.client.messages import (
    Abort,
    EngineCoreMethods,
    EngineStarted,
    FromEngine,
    Stepped,
    Submit,
    ToEngine,
)
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, EngineError, RequestQuarantined
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest, EngineInfo
from quire.engine.core.stats import BlockTableView, EngineStats
from quire.engine.processes.exit_cause import ExitCause
from quire.engine.processes.utility_calls import (
    START,
    Fault,
    UtilityCall,
    UtilityResult,
    decode_arguments,
    make_result,
)

INFO = EngineInfo("fake", "float32", "cpu", "none", 100, 10, 16, 0, 0, 0.0, "none")
KILLED, CRASHED = ExitCause("was killed", external=True), ExitCause("crashed", external=False)
LENGTH = 9
"""Tokens per answer."""


def started(info: EngineInfo = INFO) -> UtilityResult:
    """The message of a process whose engine has started."""
    return make_result(START, EngineStarted(info))


def cannot_start(message: str) -> UtilityResult:
    return UtilityResult(START, error=Fault.of(ConfigError(message)))


def token(request_id: str, position: int) -> int:
    return hash((request_id, position)) % 1000


class FakeProcess(EngineProcess):
    """Computes one token per request and step; crashes at the third token of a request with "killer" in its id."""

    def __init__(
        self, config: EngineConfig, on_begun: Callable[[Sequence[str]], None], environment: Mapping[str, str]
    ) -> None:
        self.environment = environment
        self._on_begun = on_begun
        self._sent: asyncio.Queue[FromEngine] = asyncio.Queue()
        self._exit: asyncio.Future[ExitCause] = asyncio.get_running_loop().create_future()
        self._running: dict[str, EngineCoreRequest] = {}
        self._tokens: dict[str, int] = {}
        self.answers = True
        """False if it never reports that it has freed its engine."""

    @property
    def is_connected(self) -> bool:
        return True

    @property
    def pid(self) -> int:
        return 2**31 - 1  # no process's: none is bound to cores

    @property
    def silence(self) -> float:
        return 0.0

    def connect(self) -> None:
        self._sent.put_nowait(started())

    def send(self, message: ToEngine) -> None:
        match message:
            case Submit(requests):
                for request in requests:
                    assert request.id not in self._running, "sent twice"
                    self._running[request.id] = request
                    self._tokens[request.id] = len(request.emitted_ids)
                    assert request.emitted_ids == [token(request.id, i) for i in range(len(request.emitted_ids))]
            case UtilityCall("sleep", id=int(id)):
                self._let_go(make_result(id, None))
            case UtilityCall("get_block_table", id=int(id)):
                request_id = decode_arguments(EngineCoreMethods, message)["request_id"]
                known = request_id in self._running
                table = BlockTableView(16, 1, self._tokens[request_id], 1, [3], [1], [False]) if known else None
                self._sent.put_nowait(make_result(id, table))
            case UtilityCall("check_weights", id=int(id)):
                self._sent.put_nowait(make_result(id, None))
            case UtilityCall("load_weights", id=int(id)):
                self._let_go(make_result(id, EngineStarted(INFO)))
            case Abort(ids):
                for request_id in ids:
                    self._running.pop(request_id, None)

    def _let_go(self, answer: UtilityResult) -> None:
        if self.answers:
            self._running.clear()
            self._sent.put_nowait(answer)

    def step(self, max_requests: int) -> None:
        if self._exit.done() or not self._running:
            return
        ids = list(self._running)[:max_requests]
        self._on_begun(ids)
        if any("killer" in each and self._tokens[each] >= 2 for each in ids):
            return self.exit(CRASHED)
        outputs = []
        for each in ids:
            position = self._tokens[each]
            self._tokens[each] += 1
            reason = "length" if self._tokens[each] == LENGTH else None
            outputs.append(
                EngineCoreOutput(each, [token(each, position)], finish_reason=reason, cached_tokens=position)
            )
            if reason:
                del self._running[each]
        self._sent.put_nowait(Stepped(outputs, EngineStats()))

    def exit(self, cause: ExitCause) -> None:
        if not self._exit.done():
            self._exit.set_result(cause)

    async def receive(self) -> FromEngine:
        if self._sent.empty():
            await asyncio.sleep(0)
        return await self._sent.get()

    async def wait_for_exit(self) -> ExitCause:
        return await asyncio.shield(self._exit)

    async def wait_until_ended(self, exited: asyncio.Task[ExitCause], seconds: float) -> None:
        await asyncio.wait([exited])

    async def stop(self) -> None:
        self.exit(KILLED)

    def close(self) -> None:
        assert self._exit.done()


class Caller:
    """Submits a group of requests and reads their outputs to the end."""

    def __init__(self, client: EngineClient, ids: Iterable[str]) -> None:
        params = SamplingParams(max_tokens=LENGTH)
        self.found: dict[str, list[int]] = {each: [] for each in ids}
        self.cached: set[tuple[str, int]] = set()
        self.aborted: set[str] = set()
        self.error: EngineError | None = None
        self.stream = client.submit(
            [EngineCoreRequest(id=each, prompt_ids=[1], params=params, seed=0) for each in self.found]
        )
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for outputs in self.stream:
                for output in outputs:
                    self.found[output.id] += output.new_ids
                    self.cached.add((output.id, output.cached_tokens))
        except EngineError as error:
            self.error = error

    def abort(self, index: int) -> None:
        if self.task.done():  # there is nothing left to abort
            return
        each = sorted(self.found)[index % len(self.found)]
        self.stream.abort(each)
        self.aborted.add(each)

    def check(self) -> None:
        assert self.task.done()
        killers = {each for each in self.found if "killer" in each} - self.aborted
        assert (self.error is not None) == bool(killers)
        assert self.error is None or isinstance(self.error, RequestQuarantined)
        for each, ids in self.found.items():
            whole = [token(each, i) for i in range(LENGTH)]
            assert ids == whole[: len(ids)], "a token was lost, repeated or changed"
            assert len(ids) == LENGTH or each in self.aborted or killers
        assert len({each for each, _ in self.cached}) == len(self.cached), "cached_tokens changed with a replay"


async def settle() -> None:
    """Let all tasks run until they wait for something new."""
    for _ in range(12):
        await asyncio.sleep(0)
