"""An API server leader and its clients, all in one process, with a fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from quire.engine.client.api_server_leader import ApiServerLeader
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.messages import LASTING, FromLeader, LeaderMethods, SharedSteps, decode_to_leader
from quire.engine.client.relay import ApiProcessChannel, RelayReader
from quire.engine.client.shared_client import NoWeightsGroup, SharedClient
from quire.engine.common import errors
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, EngineError, InvalidRequest, ModelError, Overloaded, RateLimited
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest
from quire.engine.core.stats import EngineStats, StepRecord
from quire.engine.processes.utility_calls import Fault, UtilityResult, decode_result, encode
from quire.server.durability.peers import Peers
from tests.server.fake import FakeEngine, hashed

PICK = hashed(range(10, 90))


@dataclass(frozen=True)
class Shared:
    engine: FakeEngine
    hub: ApiServerLeader
    clients: list[EngineClient]


@asynccontextmanager
async def shared(
    folder: Path, count: int = 2, *, tell: float = 1.0, alive: float = 1.0, silence: float = 10.0, **options: float
) -> AsyncIterator[Shared]:
    engine, address = FakeEngine(PICK, **options), f"ipc://{folder}/hub"  # type: ignore[arg-type]
    hub = ApiServerLeader(EngineClient(engine), address, tell_seconds=tell)
    seconds = {"alive_seconds": alive, "silence_seconds": silence}
    links = [SharedClient(EngineConfig(), address, str(number), **seconds) for number in range(count)]
    clients = [EngineClient(link) for link in links]
    try:
        hub.listen()
        for number, client in enumerate(clients):
            hub.add(str(number).encode(), number)
            client.engine_core.launch()
        hub.ready(await engine.start())
        async with asyncio.timeout(60):
            assert all([(await client.engine_core.start()).model == "fake" for client in clients])
            await until(lambda: all(client.responsive for client in clients))
            yield Shared(engine, hub, clients)
    finally:
        for client in clients:
            await client.engine_core.stop()
        await engine.stop()
        await hub.close()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - a poll is soon enough
        await asyncio.sleep(0.01)


def request(id: str, *, tokens: int = 12, tenant: str = "") -> EngineCoreRequest:
    params = SamplingParams(max_tokens=tokens)
    return EngineCoreRequest(id=id, prompt_ids=[1, 2, 3], params=params, seed=7, tenant=tenant)


async def tokens_of(client: EngineClient, *requests: EngineCoreRequest) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {each.id: [] for each in requests}
    async for outputs in client.submit(list(requests)):
        for output in outputs:
            tokens[output.id] += output.new_ids
    return tokens


async def test_each_client_receives_tokens_of_its_requests(tmp_path: Path) -> None:
    async with shared(tmp_path) as server:
        one, two = server.clients
        tokens = await asyncio.gather(
            tokens_of(one, request("a"), request("b")), tokens_of(two, request("c")), tokens_of(one, request("d"))
        )
        expected = [PICK(request("a"), position) for position in range(12)]
        assert tokens == [{"a": expected, "b": expected}, {"c": expected}, {"d": expected}]
        await until(lambda: one.num_open == two.num_open == 0)
        assert server.engine.generated == 48
        await until(
            lambda: one.engine_core.stats.generation_tokens == 48
        )  # the last step's stats arrive after its tokens
        assert [each.id for each in one.history.ended_timelines] == ["a", "b", "d"]


def test_relay_sends_one_message_per_api_process_for_all_streams() -> None:
    written: list[FromLeader] = []
    channel = ApiProcessChannel(0, written.append)
    channel.welcomed = True
    streams = [RelayReader([request(f"s{n}")], channel, list) for n in range(100)]
    for step in range(3):
        channel.begin(None, 0, "1", counts=True)
        for number, stream in enumerate(streams):
            stream.push(EngineCoreOutput(f"s{number}", [step]), "1")
    channel.begin(None, 0, "1", counts=True)  # a step of other processes' requests only
    channel.flush([EngineStats()])
    channel.flush([EngineStats()])
    (message,) = written
    assert isinstance(message, SharedSteps)
    assert [[output.new_ids for output in step.outputs] for step in message.steps] == [[[n]] * 100 for n in range(3)]


async def test_leader_aborts_only_requests_of_removed_api_process(tmp_path: Path) -> None:
    async with shared(tmp_path, step_seconds=0.01) as server:
        one, two = server.clients
        lost = one.submit([request("lost-0", tokens=400), request("lost-1", tokens=400)])
        stays = asyncio.create_task(tokens_of(two, request("stays", tokens=30)))
        await until(lambda: len(server.engine.running) == 3)
        assert server.hub.remove(b"0") == 2
        assert sorted(server.engine.aborted) == ["lost-0", "lost-1"]
        assert len((await stays)["stays"]) == 30
        lost.close()


async def test_api_process_that_joins_late_is_served(tmp_path: Path) -> None:
    async with shared(tmp_path) as server:
        server.hub.remove(b"1")
        server.hub.add(b"1.1", 1)
        late = EngineClient(SharedClient(EngineConfig(), f"ipc://{tmp_path}/hub", "1.1"))
        late.engine_core.launch()
        assert (await late.engine_core.start()).model == "fake"
        assert len((await tokens_of(late, request("x")))["x"]) == 12
        await late.engine_core.stop()


async def test_closed_stream_aborts_request_in_engine(tmp_path: Path) -> None:
    async with shared(tmp_path, step_seconds=0.01) as server:
        stream = server.clients[0].submit([request("a", tokens=400)])
        await until(lambda: bool(server.engine.running))
        stream.close()
        await until(lambda: server.engine.aborted == ["a"])
        await until(lambda: server.clients[1].num_open == 0)


async def test_engine_death_raises_in_all_clients(tmp_path: Path) -> None:
    async with shared(tmp_path, step_seconds=0.01) as server:
        tasks = [asyncio.create_task(tokens_of(client, request(str(client), tokens=400))) for client in server.clients]
        await until(lambda: len(server.engine.running) == 2)
        server.engine.die("the engine died")
        for task in tasks:
            with pytest.raises(EngineError, match="the engine died"):
                await task
        await until(lambda: not any(client.alive for client in server.clients))
        with pytest.raises(EngineError, match="the engine died"):
            server.clients[0].submit([request("late")])


async def test_calls_raise_overloaded_when_leader_stalls(tmp_path: Path) -> None:
    async with shared(tmp_path, tell=0.1, alive=0.02, silence=0.3, step_seconds=0.01) as server:
        client = server.clients[0]
        await asyncio.sleep(0.5)
        assert client.healthy, "the hub gives signs of life though nothing happens"
        await server.hub._tasks.cancel()
        server.engine.asleep = True
        generation = asyncio.create_task(tokens_of(client, request("a")))
        wake_up = asyncio.create_task(client.engine_core.wake_up())
        for task in (generation, wake_up):
            with pytest.raises(Overloaded, match="does not respond"):
                await asyncio.wait_for(task, 30)
        assert not client.healthy
        assert client.alive


async def test_quarantine_ends_only_streams_of_that_call(tmp_path: Path) -> None:
    async with shared(tmp_path, step_seconds=0.01) as server:
        quarantined = asyncio.create_task(
            tokens_of(server.clients[0], request("a", tokens=400), request("b", tokens=400))
        )
        stays = asyncio.create_task(tokens_of(server.clients[0], request("c", tokens=30)))
        await until(lambda: len(server.engine.running) == 3)
        server.engine.owner.give_up("a", errors.RequestQuarantined("it ends engines"))
        with pytest.raises(errors.RequestQuarantined, match="it ends engines"):
            await quarantined
        assert len((await stays)["c"]) == 30
        assert sorted(server.engine.aborted) == ["a", "b"]


async def test_queue_counts_are_shared_by_all_clients(tmp_path: Path) -> None:
    async with shared(tmp_path) as server:
        one, two = server.clients
        server.engine.asleep = True  # so that nothing is computed
        streams = [one.submit([request("a", tenant="x")]), one.submit([request("b", tenant="y")])]
        streams.append(two.submit([request("c", tenant="x")]))
        await until(lambda: (one.num_open, two.num_open) == (3, 3))
        assert [client.num_open_of("x") for client in server.clients] == [2, 2]
        assert [client.num_open_of("y") for client in server.clients] == [1, 1]
        await until(lambda: (one.queued_tokens, two.queued_tokens) == (9, 9))
        for stream in streams:
            stream.close()
        await until(lambda: (one.num_open, two.num_open, one.queued_tokens, two.queued_tokens) == (0, 0, 0, 0))


async def test_ask_gathers_peer_answers_and_keeps_counts_of_removed_peer(tmp_path: Path) -> None:
    async with shared(tmp_path, 3) as server:

        def answering(client: EngineClient, number: int) -> None:
            async def say(body: bytes) -> bytes | None:
                return None if number == 2 else body + str(number).encode()

            async def count(body: bytes) -> bytes:
                return f"count {number}".encode()

            peers = Peers(client.engine_core, None)
            peers.register_handler("name", say)
            peers.register_handler(LASTING, count)

        for number, client in enumerate(server.clients):
            answering(client, number)
        one, two, three = server.clients
        assert await one.engine_core.ask("name", b"I am ") == [b"I am 1"]
        assert await three.engine_core.ask("name", b"I am ") == [b"I am 0", b"I am 1"]
        assert await one.engine_core.ask("unknown") == []
        assert sorted(await one.engine_core.ask(LASTING)) == [b"count 1", b"count 2"]
        server.hub.remove(b"1")
        await two.engine_core.stop()
        assert sorted(await one.engine_core.ask(LASTING)) == [b"count 1", b"count 2"]
        server.hub.add(b"1.1", 1)
        heir = EngineClient(SharedClient(EngineConfig(), f"ipc://{tmp_path}/hub", "1.1"))
        heir.engine_core.launch()
        await heir.engine_core.start()
        assert heir.engine_core.inherited == b"count 1"
        await heir.engine_core.stop()


async def test_failing_peer_handler_affects_no_other_call(tmp_path: Path) -> None:
    async with shared(tmp_path, step_seconds=0.01) as server:
        one, two = server.clients

        async def fail(*_: object) -> bytes:
            raise ValueError

        Peers(two.engine_core, None).register_handler("name", fail)
        with pytest.raises(AssertionError, match="two handlers"):
            Peers(two.engine_core, None).register_handler("name", fail)
        server.engine.snapshot = fail  # type: ignore[method-assign, assignment]
        stays = [asyncio.create_task(tokens_of(client, request(str(client), tokens=30))) for client in server.clients]
        async with asyncio.timeout(20):
            assert await one.engine_core.ask("name", b"?") == await one.engine_core.ask("name", b"?", to="1") == []
            assert await one.engine_core.snapshot() is None, "the hub's process could not answer"
            assert [len(tokens) for each in stays for tokens in (await each).values()] == [30, 30]


async def test_client_fails_after_undecodable_leader_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with shared(tmp_path, step_seconds=0.01) as server:
        one, two = server.clients
        gone = asyncio.Event()
        one.engine_core.on_failure = gone.set
        stream = one.submit([request("a", tokens=400)])
        await until(lambda: bool(server.engine.running))
        server.hub._wire.send(b"0", b"\xc1")
        await asyncio.wait_for(gone.wait(), 10)
        assert one.alive, "its process ends at once: nobody is told before that anything failed"
        assert "ValidationError" in caplog.text or "DecodeError" in caplog.text, "why, with a traceback"
        stream.close()
        assert two.alive
        server.hub._wire.send(b"1", b"\xc1")
        await until(lambda: not two.alive)


async def test_step_records_reach_all_clients_and_one_counts_them(tmp_path: Path) -> None:
    async with shared(tmp_path) as server:
        seen: list[list[bool]] = [[], []]
        for client, steps in zip(server.clients, seen, strict=True):
            client.history.listeners.append(lambda step, steps=steps: steps.append(step.is_counted))  # type: ignore[misc]
        for number in range(5):
            record = StepRecord(number, 0.0, 0.0, 0.0, 0.0, 1, 1, (), ())
            server.engine.owner.deliver([], record)
        await until(lambda: [len(steps) for steps in seen] == [5, 5])
        assert sorted(seen) == [[False] * 5, [True] * 5]


async def test_engine_death_appears_in_request_timeline(tmp_path: Path) -> None:
    async with shared(tmp_path, step_seconds=0.01) as server:
        generation = asyncio.create_task(tokens_of(server.clients[0], request("a", tokens=30)))
        await until(lambda: bool(server.engine.running))
        server.engine.owner.handle_engine_loss()
        await generation
        timeline = server.clients[0].history.find_timeline("a")
        assert timeline is not None
        assert timeline.count_phase("recovering") == 1


async def test_weight_changes_reach_all_clients(tmp_path: Path) -> None:
    async with shared(tmp_path) as server:
        one, two = server.clients
        versions: list[str] = []
        two.engine_core.on_version.append(versions.append)
        await one.engine_core.sleep(refuse=True)
        await until(lambda: two.engine_core.asleep and two.refusing)
        with pytest.raises(InvalidRequest, match="level must be 1 or 2") as error:
            await two.engine_core.sleep(3)
        assert error.value.param == "level"
        await two.engine_core.wake_up()
        await until(lambda: not one.engine_core.asleep)
        assert await one.engine_core.update(str(tmp_path), version="next") == "next"
        assert one.engine_core.weights_version == "next"
        await until(lambda: versions == ["next"])
        with pytest.raises(InvalidRequest, match="--api-server-count"):
            await NoWeightsGroup(one.engine_core).join(None)  # type: ignore[arg-type]


async def test_snapshot_and_block_table_come_from_engine(tmp_path: Path) -> None:
    async with shared(tmp_path, step_seconds=0.01) as server:
        generation = asyncio.create_task(tokens_of(server.clients[0], request("a", tokens=40)))
        await until(lambda: bool(server.engine.running))
        view = await server.clients[1].snapshot()
        assert [each.id for each in view.requests] == ["a"]
        table = await server.clients[1].engine_core.get_block_table("a")
        assert table is not None
        assert table.block_ids == [7, 3]
        assert await server.clients[0].engine_core.get_block_table("b") is None
        await generation


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("bad", param="n"), InvalidRequest),
        (Overloaded("full"), Overloaded),
        (ModelError("no such model"), ConfigError),
    ],
)
def test_errors_keep_class_message_and_param_over_wire(error: errors.QuireError, kind: type[errors.QuireError]) -> None:
    sent = encode(UtilityResult(1, error=Fault.of(error)))
    message = decode_to_leader(sent)
    assert isinstance(message, UtilityResult)
    with pytest.raises(kind) as caught:
        decode_result(LeaderMethods.join, message)
    assert type(caught.value) is kind
    assert (caught.value.message, caught.value.param) == (error.message, error.param)


def test_every_quire_error_can_be_rebuilt_from_fault() -> None:
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.QuireError) and kind is not RateLimited:
            assert isinstance(Fault(kind.__name__, "why").error(), errors.QuireError)
