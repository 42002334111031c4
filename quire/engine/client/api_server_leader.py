"""Lets several API processes share one engine: ApiServerLeader in the process that has the engine's client,
SharedClient (shared_client.py) in each of the others.

The leader keeps no text and no history. It knows which API process has which open request, sends it the engine's
outputs, aborts the requests of an API process that has ended, and passes questions from one API process to the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import zmq

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.messages import (
    CANNOT_ANSWER,
    LASTING,
    LEADER,
    Abort,
    ApiProcessMethods,
    FromLeader,
    LeaderMethods,
    State,
    Submit,
    ToLeader,
    decode_to_leader,
    together,
)
from quire.engine.client.relay import ApiProcessChannel, RelayReader
from quire.engine.client.weights import Mode, Weights
from quire.engine.common import clock
from quire.engine.common.errors import EngineError, QuireError
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest, EngineInfo
from quire.engine.core.stats import BlockTableView, EngineStats, EngineView, StepRecord
from quire.engine.processes.answering import Answering
from quire.engine.processes.heartbeat import Alive
from quire.engine.processes.procfs import WatchTimer
from quire.engine.processes.tasks import Tasks
from quire.engine.processes.utility_calls import (
    Fault,
    UtilityCall,
    UtilityResult,
    encode,
    make_notification,
    run_call,
    run_call_in_task,
)
from quire.engine.processes.wire import Wire

log = logging.getLogger("quire.hub")

_TICK_SECONDS = 0.1
"""Time between two looks at how the engines are."""
_ANSWER_SECONDS = 2.0
"""How long an API process may take to answer a question to all."""
_LONG_ANSWER_SECONDS = 10.0
"""The same of a question to it alone, which nobody else can answer."""
_REMEMBER_SECONDS = 5.0
"""Time between two questions to all API processes for the counts that would be lost with them."""


class ApiServerLeader:
    """All methods must be called from the client's event loop."""

    def __init__(
        self, client: EngineClient, address: str, wire: Callable[..., Wire] = Wire, *, tell_seconds: float = 1.0
    ) -> None:
        """address: where API processes connect, as ZeroMQ writes it. tell_seconds: after so long the state is sent
        again though nothing has changed: it is the leader's sign of life."""
        self.client, self._tell_seconds = client, tell_seconds
        self.weights = Weights(client)
        client.recorder = self  # what happened to a request is kept by the API process that has it
        client.turns = None  # so are turns
        self._wire = wire(zmq.ROUTER)
        self._address = address
        self._channels: dict[bytes, ApiProcessChannel] = {}
        """By the identity of the API process."""
        self._info: EngineInfo | None = None
        self._flushing = False
        self._state: State | None = None
        """The last one that was sent."""
        self._lasting: dict[int, bytes] = {}
        """By number of the API process: its last answer to LASTING."""
        self._tasks = Tasks(self._handle_failure)
        self.answering = Answering()
        """How this process answers what API processes ask it."""
        self.changed = asyncio.Event()
        """Set when an API process has started, or cannot; then another event takes its place."""

    def listen(self) -> None:
        """Begin to hear API processes. Raises EngineError where there can be no socket."""
        self._wire.bind(self._address)
        self._tasks.begin(self._receive())
        self._tasks.begin(self._tick())
        self._tasks.begin(self._remember())

    @property
    def channels(self) -> list[ApiProcessChannel]:
        """The API processes that there are."""
        return list(self._channels.values())

    def ready(self, info: EngineInfo) -> None:
        """The engine is ready: API processes may begin."""
        self._info = info
        for identity, channel in self._channels.items():
            self.welcome(identity, channel)

    def add(self, identity: bytes, number: int) -> ApiProcessChannel:
        """Expect an API process with this identity."""
        channel = ApiProcessChannel(number, lambda message: self._write(identity, message))
        self._channels[identity] = channel
        return channel

    def remove(self, identity: bytes) -> int:
        """An API process has ended: abort its requests. Returns how many these were."""
        channel = self._channels.pop(identity)
        channel.calls.end(EngineError("the API process has ended"))
        return self.client.drop(lambda reader: isinstance(reader, RelayReader) and reader.channel is channel)

    async def close(self) -> None:
        await self._tasks.cancel()
        self._wire.close()

    def _handle_failure(self, error: BaseException) -> None:
        log.error("the hub failed", exc_info=error)
        self.client.fail(EngineError(f"the hub failed: {type(error).__name__}"))

    def _write(self, identity: bytes, message: FromLeader) -> None:
        self._wire.send(identity, encode(message))

    def _stats(self) -> list[EngineStats]:
        return [each.stats for each in self.client.engine_core.engines]

    async def _receive(self) -> None:
        while True:
            identity, message = await self._wire.receive()
            channel = self._channels.get(identity)
            if channel is not None:  # else it has ended
                channel.silence = 0.0
                self._take(identity, channel, decode_to_leader(message))

    def _take(self, identity: bytes, channel: ApiProcessChannel, message: ToLeader) -> None:
        match message:
            case Submit():
                self._submit(channel, message)
            case Abort():
                for request_id in message.ids:
                    self.client.abort(request_id)
            case UtilityCall(id=None):
                run_call(LeaderMethods, _ApiProcessCalls(self, identity, channel), message)
            case UtilityCall():
                self._tasks.begin(self._answer(identity, channel, message))
            case UtilityResult():
                channel.calls.resolve(message)
            case Alive():
                pass

    def welcome(self, identity: bytes, channel: ApiProcessChannel) -> None:
        """Tell an API process that the engine is ready, once both are there."""
        if self._info is not None:
            channel.welcomed = True
            about = self._info, self._now(), self._lasting.get(channel.number)
            self._write(identity, make_notification(ApiProcessMethods.welcome, *about))

    def report_start(self) -> None:
        """An API process has started, or cannot."""
        self.changed.set()
        self.changed = asyncio.Event()

    def _submit(self, channel: ApiProcessChannel, message: Submit) -> None:
        requests = together(message.requests, message.images)
        reader = RelayReader(requests, channel, self._stats)
        try:
            self.client.add(requests, reader)
        except QuireError as error:
            reader.fail(error)

    # From the engine: what a Recorder is told

    def record_submission(self, request: EngineCoreRequest) -> None:
        """The API process has recorded it."""

    def record_step(self, outputs: Sequence[EngineCoreOutput], record: StepRecord | None, replica: int = 0) -> None:
        version, first = self.client.engine_core.weights_version, True
        for channel in self._channels.values():
            channel.begin(record, replica, version, counts=first)
            first = first and not channel.welcomed
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing, stats = False, self._stats()
        for channel in self._channels.values():
            channel.flush(stats)

    def record_engine_death(
        self, replica: int = 0, ids: Iterable[str] | None = None, *, for_good: bool = False
    ) -> None:
        if not for_good:  # then all readers fail, which each API process is told
            self._tell(make_notification(ApiProcessMethods.lose_engine, replica, None if ids is None else list(ids)))
            asyncio.get_running_loop().call_soon(self._tell_state)

    def end_request(self, request_id: str, reason: str) -> None:
        """The API process records it."""

    def _tell(self, message: FromLeader) -> None:
        """Tell all API processes."""
        stats = self._stats()
        for channel in self._channels.values():
            if channel.welcomed:
                channel.send(message, stats)

    # What API processes want

    async def _answer(self, identity: bytes, channel: ApiProcessChannel, call: UtilityCall) -> None:
        assert call.id is not None
        try:
            result = await run_call_in_task(LeaderMethods, _ApiProcessCalls(self, identity, channel), call)
        except Exception:
            log.exception("the question %r of another process could not be answered", call.method)
            result = UtilityResult(call.id, error=Fault.of(EngineError(CANNOT_ANSWER)))
        channel.send(result, self._stats())

    async def change_weights(self, change: Coroutine[Any, Any, object]) -> str:
        """Have a change of Weights made. Returns their version."""
        fault: QuireError | None = None
        try:
            await change
        except QuireError as error:
            fault = error
        self._tell_state()
        # Messages to an API process arrive in their order. When all have answered this question, all have been told of
        # the change, and the one that asked for it can rely on that.
        await self._answers("", b"", self._others())
        if fault is not None:
            raise fault
        return self.client.engine_core.weights_version

    async def ask(self, identity: bytes, topic: str, body: bytes, to: str | None) -> list[bytes]:
        """See LeaderMethods.ask, on behalf of an API process."""
        if to == LEADER:
            said = await self.answering.answer(topic, body)
            bodies = [] if said is None else [said]
        elif to is not None:
            asks = [(who, each) for who, each in self._others(identity) if who == to.encode()]
            bodies = await self._answers(topic, body, asks, _LONG_ANSWER_SECONDS)
        else:
            bodies = await self._answers(topic, body, self._others(identity))
        if topic == LASTING:  # those that are being replaced
            there = {each.number for each in self._channels.values() if each.welcomed}
            bodies += [body for number, body in self._lasting.items() if number not in there]
        return bodies

    def _others(self, but: bytes | None = None) -> list[tuple[bytes, ApiProcessChannel]]:
        """All API processes that can be asked, or all but one."""
        return [(who, each) for who, each in self._channels.items() if who != but and each.welcomed]

    async def _answers(
        self,
        topic: str,
        body: bytes,
        asked: Sequence[tuple[bytes, ApiProcessChannel]],
        seconds: float = _ANSWER_SECONDS,
    ) -> list[bytes]:
        """The answers of these API processes that come in so many seconds."""
        answers = {channel: channel.calls.begin(ApiProcessMethods.answer, topic, body) for _, channel in asked}
        if answers:
            await asyncio.wait(answers.values(), timeout=seconds)
        found = []
        for channel, answer in answers.items():
            is_there = not answer.cancel() and answer.exception() is None
            said = answer.result() if is_there else None
            if topic == LASTING:
                said = self._lasting[channel.number] = said or self._lasting.get(channel.number, b"")
            found.append(said)
        return [said for said in found if said]

    async def _remember(self) -> None:
        while True:
            await asyncio.sleep(_REMEMBER_SECONDS)
            await self._answers(LASTING, b"", self._others())

    # How the engines are

    async def _tick(self) -> None:
        told, timer = clock.monotonic(), WatchTimer(_TICK_SECONDS)
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            elapsed = timer.measure_elapsed()
            for channel in self._channels.values():
                channel.silence += elapsed
            if clock.monotonic() - told > self._tell_seconds:
                self._state, told = None, clock.monotonic()
            self._tell_state()

    def _tell_state(self) -> None:
        state = self._now()
        if state != self._state:
            self._state = state
            self._tell(make_notification(ApiProcessMethods.update_state, state))

    def _now(self) -> State:
        client, engine_core = self.client, self.client.engine_core
        return State(
            engines=[*engine_core.engines],
            responsive=client.responsive,
            healthy=client.healthy,
            asleep=engine_core.asleep,
            refusing=client.refusing,
            weights_version=engine_core.weights_version,
            weights_path=engine_core.weights_paths.get(engine_core.weights_version),
            deaths=engine_core.deaths,
            replays=engine_core.replays,
            quarantined=engine_core.quarantined,
            failure=None if client.failure is None else Fault.of(client.failure),
            open=dict(client.open_by_tenant),
            queued_tokens=client.queued_tokens,
        )


class _ApiProcessCalls(LeaderMethods):
    """What one API process has the leader do."""

    def __init__(self, leader: ApiServerLeader, identity: bytes, channel: ApiProcessChannel) -> None:
        self._leader = leader
        self._identity = identity
        self._channel = channel

    def join(self) -> None:
        self._leader.welcome(self._identity, self._channel)

    def announce(self, announcement: str) -> None:
        self._channel.announcement = announcement
        self._leader.report_start()

    def report_failed_start(self, fault: Fault) -> None:
        self._channel.fault = fault
        self._leader.report_start()

    def reset_prefix_cache(self) -> None:
        self._leader.client.reset_prefix_cache()

    async def take_snapshot(self) -> EngineView | None:
        client = self._leader.client
        return await client.snapshot() if client.responsive else None

    async def get_block_table(self, request_id: str) -> BlockTableView | None:
        client = self._leader.client
        return await client.engine_core.get_block_table(request_id) if client.responsive else None

    async def ask(self, topic: str, body: bytes, to: str | None) -> list[bytes]:
        return await self._leader.ask(self._identity, topic, body, to)

    async def sleep(self, level: int = 1, mode: Mode = "keep", *, refuse: bool = False) -> None:
        await self._leader.change_weights(self._leader.weights.sleep(level, mode, refuse=refuse))

    async def wake_up(self) -> None:
        await self._leader.change_weights(self._leader.weights.wake_up())

    async def update(self, path: str, mode: Mode = "keep", version: str | None = None) -> str:
        return await self._leader.change_weights(self._leader.weights.update(path, mode, version))
