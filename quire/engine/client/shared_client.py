"""An API process's client of an engine that it reaches through the leader (api_server_leader.py). What it knows of the
engine's state is up to 0.1 s old.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

import zmq

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_core_client import EngineCoreClient, EngineState
from quire.engine.client.messages import (
    CANNOT_ANSWER,
    LEADER,
    Abort,
    ApiProcessMethods,
    FromLeader,
    LeaderMethods,
    SharedEngineState,
    SharedSteps,
    Submit,
    ToLeader,
    decode_from_leader,
    detach_images,
)
from quire.engine.client.weight_broadcast import Group, WeightsGroup
from quire.engine.client.weights import Mode
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import EngineError, InvalidRequest, Overloaded, QuireError
from quire.engine.common.types import EngineCoreRequest, EngineInfo
from quire.engine.core.stats import BlockTableView, EngineStats, EngineView, sum_stats
from quire.engine.processes.answering import Answering
from quire.engine.processes.heartbeat import Alive
from quire.engine.processes.procfs import WatchTimer
from quire.engine.processes.tasks import Tasks
from quire.engine.processes.utility_calls import (
    Fault,
    UtilityCall,
    UtilityCalls,
    UtilityResult,
    encode,
    make_notification,
    run_call,
    run_call_in_task,
)
from quire.engine.processes.wire import Wire

log = logging.getLogger("quire.hub")
_LINGER_MS = 1000


class SharedClient(EngineCoreClient, ApiProcessMethods):
    owner: EngineClient
    explains_prefixes = True

    def __init__(
        self,
        config: EngineConfig,
        address: str,
        identity: str,
        wire: Callable[..., Wire] = Wire,
        *,
        alive_seconds: float = 1.0,
        silence_seconds: float = 10.0,
    ) -> None:
        """If the leader is silent for `silence_seconds`, calls and waiting requests fail."""
        super().__init__()
        self._make_wire = wire
        self._alive_seconds, self._silence_seconds = alive_seconds, silence_seconds
        self.answering = Answering()
        self.on_version: list[Callable[[str], None]] = []
        self._last_version = self.weights_version
        self.inherited: bytes | None = None
        """The last answer to LASTING (messages.py) of the process that this one replaces, if any."""
        self.on_failure: Callable[[], object] = partial(self.die, "the connection to the engine failed")
        """Called when a bug prevents this process from following the leader."""
        self.identity = identity
        self._address = address
        self._wire: Wire | None = None
        self._welcome: asyncio.Future[EngineInfo] | None = None
        self._states = [EngineState(EngineStats(), responsive=False, asleep=False)] * config.data_parallel_size
        self._responsive = self._healthy = False
        self._silence = 0.0
        self._calls = UtilityCalls(self._write)
        self._unsent_aborts: list[str] = []
        self._tasks = Tasks(self._handle_failure)

    def launch(self) -> None:
        self._welcome = asyncio.get_running_loop().create_future()
        self._wire = self._make_wire(zmq.DEALER, linger_ms=_LINGER_MS, identity=self.identity.encode())
        self._wire.connect(self._address)
        self._write(make_notification(LeaderMethods.join))
        self._tasks.begin(self._receive())
        self._tasks.begin(self._live())

    async def start(self) -> EngineInfo:
        assert self._welcome is not None, "launch comes first"
        return await self._welcome

    async def stop(self) -> None:
        self.die("the engine was stopped")
        self._calls.end(EngineError("the engine was stopped"))
        await self._tasks.cancel()
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def tell_serving(self, announcement: str) -> None:
        self._write(make_notification(LeaderMethods.announce, announcement))

    @property
    def responsive(self) -> bool:
        return self._responsive and self._silence <= self._silence_seconds

    @property
    def healthy(self) -> bool:
        return self._healthy and self._silence <= self._silence_seconds

    @property
    def engines(self) -> Sequence[EngineState]:
        return self._states

    def reset_prefix_cache(self) -> None:
        self._write(make_notification(LeaderMethods.reset_prefix_cache))

    async def ask(self, topic: str, body: bytes = b"", *, to: str | None = None) -> list[bytes]:
        """Late answers are missing. Raises EngineError if `to` is LEADER and it has no answer."""
        answers = await self._calls.begin(LeaderMethods.ask, topic, body, to)
        if to == LEADER and not answers:
            raise EngineError(CANNOT_ANSWER)
        return answers

    async def sleep(self, level: int = 1, mode: Mode = "keep", *, refuse: bool = False) -> None:
        """See Weights.sleep. The leader runs the changes that API processes request one after another."""
        await self._calls.begin(LeaderMethods.sleep, level, mode, refuse=refuse)

    async def wake_up(self) -> None:
        await self._calls.begin(LeaderMethods.wake_up)

    async def update(self, path: str, mode: Mode = "keep", version: str | None = None) -> str:
        return await self._calls.begin(LeaderMethods.update, path, mode, version)

    def send(self, requests: Sequence[EngineCoreRequest]) -> None:
        self._write(Submit(*detach_images(requests)))

    def abort(self, request_id: str) -> None:
        if not self._unsent_aborts:
            asyncio.get_running_loop().call_soon(self._send_aborts)
        self._unsent_aborts.append(request_id)

    def _send_aborts(self) -> None:
        ids, self._unsent_aborts = self._unsent_aborts, []
        if self._wire is not None:
            self._write(Abort(ids))

    async def snapshot(self) -> EngineView | None:
        try:
            return await self._calls.begin(LeaderMethods.take_snapshot)
        except QuireError:  # the leader has ended
            return None

    async def get_block_table(self, request_id: str) -> BlockTableView | None:
        try:
            return await self._calls.begin(LeaderMethods.get_block_table, request_id)
        except QuireError:
            return None

    async def call(self, content: bytes) -> list[bytes] | None:
        raise InvalidRequest("collective_rpc: not supported with several API processes (api_server_count)")

    def _write(self, message: ToLeader) -> None:
        if self._wire is None:
            raise EngineError("the engine was stopped")
        self._wire.send(encode(message))

    def _handle_failure(self, error: BaseException) -> None:
        log.error("the connection to the server's main process was lost", exc_info=error)
        self.on_failure()

    async def _live(self) -> None:
        timer = WatchTimer(self._alive_seconds)
        while True:
            await asyncio.sleep(self._alive_seconds)
            self._write(Alive(0))
            self._silence += timer.measure_elapsed()
            if self._silence > self._silence_seconds:
                self._give_up(Overloaded("the server's main process does not respond; please try again"))

    def _give_up(self, error: QuireError) -> None:
        self.owner.end_all(error)
        self._calls.end(error)

    async def _receive(self) -> None:
        wire = self._wire
        assert wire is not None
        while True:
            (message,) = await wire.receive()
            self._silence = 0.0
            self._take(decode_from_leader(message))

    def _take(self, message: FromLeader) -> None:
        match message:
            case SharedSteps():
                self._take_steps(message)
            case UtilityCall(id=None):
                run_call(ApiProcessMethods, self, message)
            case UtilityCall():
                self._tasks.begin(self._answer(message))
            case UtilityResult():
                self._calls.resolve(message)

    def _take_steps(self, message: SharedSteps) -> None:
        states = zip(self._states, message.stats, strict=True)
        self._states = [EngineState(stats, each.responsive, each.asleep) for each, stats in states]
        self.stats = self._total()
        for step in message.steps:
            self.weights_version = step.weights_version
            self.owner.history.counts_steps = step.counts
            self.owner.deliver(step.outputs, step.record, step.replica)

    async def _answer(self, call: UtilityCall) -> None:
        self._write(await run_call_in_task(ApiProcessMethods, self, call))

    # Methods of ApiProcessMethods

    async def answer(self, topic: str, body: bytes) -> bytes | None:
        return await self.answering.answer(topic, body)

    def welcome(self, info: EngineInfo, state: SharedEngineState, inherited: bytes | None) -> None:
        assert self._welcome is not None
        self.update_state(state)
        if not self._welcome.done():
            self.inherited = inherited
            self._welcome.set_result(info)

    def lose_engine(self, replica: int, ids: list[str] | None) -> None:
        self.owner.handle_engine_loss(replica, ids)

    def fail_requests(self, ids: list[str], fault: Fault) -> None:
        for request_id in ids:
            self.owner.give_up(request_id, fault.error())

    def update_state(self, state: SharedEngineState) -> None:
        self._states = state.engines
        self.stats = self._total()
        self._responsive, self._healthy = state.responsive, state.healthy
        self.asleep, self.owner.refusing = state.asleep, state.refusing
        self.deaths = state.deaths
        self.replays = state.replays
        self.quarantined = state.quarantined
        self.weights_version = state.weights_version
        if state.weights_path is not None:
            self.weights_paths[state.weights_version] = state.weights_path
        if self._last_version != state.weights_version:
            self._last_version = state.weights_version
            for on_version in self.on_version:
                on_version(state.weights_version)
        self.owner.share(state.open, state.queued_tokens)
        if state.failure is not None:
            self.die(state.failure.message)

    def _total(self) -> EngineStats:
        return self._states[0].stats if len(self._states) == 1 else sum_stats([each.stats for each in self._states])


class NoWeightsGroup(WeightsGroup):
    """One process would join a group, but any API process may get the group's calls."""

    async def join(self, group: Group) -> None:
        raise InvalidRequest(
            "a server with --api-server-count above 1 cannot join a process group: give its weights as a path"
        )
