"""Shares one engine among several API processes. The leader owns the engine's client; the other processes use a
SharedClient.
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
    SharedEngineState,
    Submit,
    ToLeader,
    attach_images,
    decode_to_leader,
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
_ANSWER_SECONDS = 2.0
_LONG_ANSWER_SECONDS = 10.0
_REMEMBER_SECONDS = 5.0
"""Interval at which the leader asks for the LASTING counts, which would be lost when an API process ends."""


class ApiServerLeader:
    """Call all methods from the client's event loop."""

    def __init__(
        self, client: EngineClient, address: str, wire: Callable[..., Wire] = Wire, *, tell_seconds: float = 1.0
    ) -> None:
        """`tell_seconds`: longest time between messages with the engine's state, which are also heartbeats."""
        self.client, self._tell_seconds = client, tell_seconds
        self.weights = Weights(client)
        client.recorder = self
        client.turns = None
        self._wire = wire(zmq.ROUTER)
        self._address = address
        self._channels: dict[bytes, ApiProcessChannel] = {}
        """Keyed by the API process's identity."""
        self._info: EngineInfo | None = None
        self._flushing = False
        self._state: SharedEngineState | None = None
        self._lasting: dict[int, bytes] = {}
        """The last answer to LASTING, keyed by the API process's number."""
        self._tasks = Tasks(self._handle_failure)
        self.answering = Answering()
        self.changed = asyncio.Event()
        """Set, and then replaced, when an API process has started or has failed to start."""

    def listen(self) -> None:
        """Raises EngineError if the socket cannot be created."""
        self._wire.bind(self._address)
        self._tasks.begin(self._receive())
        self._tasks.begin(self._tick())
        self._tasks.begin(self._remember())

    @property
    def channels(self) -> list[ApiProcessChannel]:
        return list(self._channels.values())

    def ready(self, info: EngineInfo) -> None:
        self._info = info
        for identity, channel in self._channels.items():
            self.welcome(identity, channel)

    def add(self, identity: bytes, number: int) -> ApiProcessChannel:
        channel = ApiProcessChannel(number, lambda message: self._write(identity, message))
        self._channels[identity] = channel
        return channel

    def remove(self, identity: bytes) -> int:
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
            if channel is not None:
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
        if self._info is not None:
            channel.welcomed = True
            about = self._info, self._now(), self._lasting.get(channel.number)
            self._write(identity, make_notification(ApiProcessMethods.welcome, *about))

    def report_start(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def _submit(self, channel: ApiProcessChannel, message: Submit) -> None:
        requests = attach_images(message.requests, message.images)
        reader = RelayReader(requests, channel, self._stats)
        try:
            self.client.add(requests, reader)
        except QuireError as error:
            reader.fail(error)

    # Methods of RequestRecorder

    def record_submission(self, request: EngineCoreRequest) -> None:
        """Does nothing, because the API process records its own requests."""

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
        if not for_good:  # otherwise the readers fail, which tells the API processes
            self._tell(make_notification(ApiProcessMethods.lose_engine, replica, None if ids is None else list(ids)))
            asyncio.get_running_loop().call_soon(self._tell_state)

    def end_request(self, request_id: str, reason: str) -> None:
        """API processes record their own requests."""

    def _tell(self, message: FromLeader) -> None:
        stats = self._stats()
        for channel in self._channels.values():
            if channel.welcomed:
                channel.send(message, stats)

    # Methods that serve calls of API processes

    async def _answer(self, identity: bytes, channel: ApiProcessChannel, call: UtilityCall) -> None:
        assert call.id is not None
        try:
            result = await run_call_in_task(LeaderMethods, _ApiProcessCalls(self, identity, channel), call)
        except Exception:
            log.exception("the call %r from another process failed", call.method)
            result = UtilityResult(call.id, error=Fault.of(EngineError(CANNOT_ANSWER)))
        channel.send(result, self._stats())

    async def change_weights(self, change: Coroutine[Any, Any, object]) -> str:
        fault: QuireError | None = None
        try:
            await change
        except QuireError as error:
            fault = error
        self._tell_state()
        # Messages arrive in order, so a process that answers has received the new state.
        await self._answers("", b"", self._others())
        if fault is not None:
            raise fault
        return self.client.engine_core.weights_version

    async def ask(self, identity: bytes, topic: str, body: bytes, to: str | None) -> list[bytes]:
        if to == LEADER:
            own_answer = await self.answering.answer(topic, body)
            bodies = [] if own_answer is None else [own_answer]
        elif to is not None:
            channels = [(who, each) for who, each in self._others(identity) if who == to.encode()]
            bodies = await self._answers(topic, body, channels, _LONG_ANSWER_SECONDS)
        else:
            bodies = await self._answers(topic, body, self._others(identity))
        if topic == LASTING:  # add the last answers of processes that are being replaced
            there = {each.number for each in self._channels.values() if each.welcomed}
            bodies += [body for number, body in self._lasting.items() if number not in there]
        return bodies

    def _others(self, but: bytes | None = None) -> list[tuple[bytes, ApiProcessChannel]]:
        return [(who, each) for who, each in self._channels.items() if who != but and each.welcomed]

    async def _answers(
        self,
        topic: str,
        body: bytes,
        channels: Sequence[tuple[bytes, ApiProcessChannel]],
        seconds: float = _ANSWER_SECONDS,
    ) -> list[bytes]:
        answers = {channel: channel.calls.begin(ApiProcessMethods.answer, topic, body) for _, channel in channels}
        if answers:
            await asyncio.wait(answers.values(), timeout=seconds)
        bodies = []
        for channel, answer in answers.items():
            is_there = not answer.cancel() and answer.exception() is None
            answer_body = answer.result() if is_there else None
            if topic == LASTING:
                answer_body = self._lasting[channel.number] = answer_body or self._lasting.get(channel.number, b"")
            bodies.append(answer_body)
        return [each for each in bodies if each]

    async def _remember(self) -> None:
        while True:
            await asyncio.sleep(_REMEMBER_SECONDS)
            await self._answers(LASTING, b"", self._others())

    async def _tick(self) -> None:
        last_update, timer = clock.monotonic(), WatchTimer(_TICK_SECONDS)
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            elapsed = timer.measure_elapsed()
            for channel in self._channels.values():
                channel.silence += elapsed
            if clock.monotonic() - last_update > self._tell_seconds:
                self._state, last_update = None, clock.monotonic()
            self._tell_state()

    def _tell_state(self) -> None:
        state = self._now()
        if state != self._state:
            self._state = state
            self._tell(make_notification(ApiProcessMethods.update_state, state))

    def _now(self) -> SharedEngineState:
        client, engine_core = self.client, self.client.engine_core
        return SharedEngineState(
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
