"""Replicas of fake engine processes that end at random moments lose, repeat and change no token. No request waits for a
replica's restart while another one can compute it.
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_process import Launcher
from quire.engine.client.messages import EngineCoreMethods, ToEngine
from quire.engine.client.process_client import ProcessClient
from quire.engine.client.replicated_client import processes
from quire.engine.client.weights import Weights
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, EngineError, Overloaded
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.processes.exit_cause import ExitCause
from quire.engine.processes.utility_calls import UtilityCall, decode_arguments
from tests.engine.fake_process import CRASHED, INFO, KILLED, LENGTH, Caller, FakeProcess, cannot_start, settle
from tests.engine.fake_process import started as engine_started
from tests.tiers import examples

N = 3
FAKE = Launcher(FakeProcess)
ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 3), st.just(0)),
    st.tuples(st.just("submit killers"), st.integers(1, 2), st.just(0)),
    st.tuples(st.just("abort"), st.integers(0, 99), st.just(0)),
    st.tuples(st.just("step"), st.integers(1, 9), st.integers(0, N - 1)),
    st.tuples(st.just("step without delivery"), st.integers(1, 9), st.integers(0, N - 1)),
    st.tuples(st.just("kill"), st.just(0), st.integers(0, N - 1)),
    st.tuples(st.just("settle"), st.just(0), st.just(0)),
)


async def started(count: int = N, launcher: Launcher = FAKE, **options: int) -> EngineClient:
    client = processes(EngineConfig(data_parallel_size=count, **options), launcher)
    await client.engine_core.start()
    return client


def process_of(client: EngineClient, number: int) -> FakeProcess | None:
    process = client.engine_core._replicas[number]._process
    assert process is None or isinstance(process, FakeProcess)
    return process


def kill(client: EngineClient, number: int, cause: ExitCause = KILLED) -> None:
    process = process_of(client, number)
    assert process is not None
    process.exit(cause)


async def compute(client: EngineClient, *numbers: int) -> None:
    """Step these replicas until no request is open; step all replicas if `numbers` is empty."""
    for _ in range(2000):
        if not client.num_open:
            break
        for number in numbers or range(len(client.engine_core._replicas)):
            if (process := process_of(client, number)) is not None:
                process.step(9)
        await asyncio.sleep(0.001)  # after engines that crashed with nothing to compute, the next one starts later
        await settle()


async def run(actions: list[tuple[str, int, int]]) -> None:
    client = await started()
    callers: list[Caller] = []
    for number, (action, value, place) in enumerate(actions):
        process = process_of(client, place)
        match action:
            case "submit" | "submit killers":
                name = "killer" if action == "submit killers" else "good"
                callers.append(Caller(client, [f"{name}-{number}-{i}" for i in range(value)]))
            case "abort" if callers:
                callers[value % len(callers)].abort(value)
            case "step" | "step without delivery" if process is not None:
                process.step(value)
            case "kill" if process is not None:
                process.exit(KILLED)
        if action not in ("step without delivery", "kill"):
            await settle()
    await compute(client)
    await settle()
    for caller in callers:
        caller.check()
    assert client.alive
    assert client.engine_core._router.open == [0] * N
    assert not client.engine_core._places
    assert not client.engine_core._unplaced
    for each in client.engine_core._replicas:
        assert each._replay.idle
        assert each._replay.take_ready() == []
    await client.engine_core.stop()


@settings(deadline=None, max_examples=examples(150))
@given(st.lists(ACTIONS, max_size=40))
def test_streams_are_complete_after_random_replica_deaths(actions: list[tuple[str, int, int]]) -> None:
    asyncio.run(run(actions))


async def test_streams_move_to_other_replica_on_death() -> None:
    client = await started(2)
    callers = [Caller(client, [f"good-{i}"]) for i in range(6)]
    await settle()
    assert client.engine_core._router.open == [3, 3]
    for number in (0, 1):
        process = process_of(client, number)
        assert process is not None
        process.step(9)
    await settle()
    kill(client, 0)
    for _ in range(50):
        await asyncio.sleep(0)
        if client.engine_core._router.open == [0, 6]:
            break
    assert client.engine_core._router.open == [0, 6], "they are with the other, whether or not the first is back"
    await compute(client, 1)
    for each in callers:
        each.check()
        assert not each.aborted
    assert (client.engine_core.deaths, client.engine_core.replays) == (1, 3)
    history = [client.history.find_timeline(f"good-{i}") for i in range(6)]
    assert sum(each is not None and each.count_phase("recovering") == 1 for each in history) == 3
    await client.engine_core.stop()


async def test_block_table_comes_from_replica_of_request() -> None:
    client = await started(2)
    Caller(client, ["a", "b"])
    await settle()
    tables = [await client.engine_core.get_block_table(each) for each in ("a", "b", "unknown")]
    assert [table and table.block_ids for table in tables] == [[3], [3], None]
    await compute(client)
    assert await client.engine_core.get_block_table("a") is None
    await client.engine_core.stop()


async def test_killer_request_crashes_only_one_replica() -> None:
    client = await started(2)
    bad = Caller(client, ["killer"])
    good = [Caller(client, [f"good-{i}"]) for i in range(3)]
    await settle()
    await compute(client)
    await settle()
    bad.check()
    for each in good:
        each.check()
    assert client.engine_core.quarantined == 1
    assert sorted(each.deaths > 0 for each in client.engine_core._replicas) == [False, True]
    await client.engine_core.stop()


async def test_requests_wait_while_all_replicas_restart() -> None:
    client = await started(2, Launcher(FakeProcess, backoff=[0.3]))
    kill(client, 0)
    kill(client, 1)
    await settle()
    assert not client.responsive
    assert not client.healthy
    assert client.alive
    caller = Caller(client, ["good"])
    await settle()
    assert len(client.engine_core._unplaced) == 1
    await compute(client)
    await settle()
    caller.check()
    await client.engine_core.stop()


class Unstartable(FakeProcess):
    def connect(self) -> None:
        self._sent.put_nowait(cannot_start("there is no room"))


async def wait_until_failed(client: EngineClient, number: int) -> None:
    for _ in range(2000):
        if client.engine_core._replicas[number].failure is not None:
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it was not given up")


async def test_replica_that_cannot_restart_is_left_out() -> None:
    kinds: list[type[FakeProcess]] = [FakeProcess]
    client = await started(2, Launcher(lambda *given: kinds[-1](*given)), max_engine_starts=1)
    kinds.append(Unstartable)
    good = [Caller(client, ["good-0"]), Caller(client, ["good-1"])]
    bad = Caller(client, ["killer"])  # the first replica has this request and good-0, and crashes
    await settle()
    await compute(client)
    await wait_until_failed(client, 0)
    await settle()
    assert isinstance(bad.error, EngineError), "the one that may have ended it went with it"
    assert client.alive
    assert client.responsive
    assert sum(len(ids) == LENGTH for each in good for ids in each.found.values()) >= 1
    kill(client, 1)
    await wait_until_failed(client, 1)
    assert not client.alive
    with pytest.raises(EngineError, match="could not be restarted"):
        client.submit([EngineCoreRequest(id="late", prompt_ids=[1], params=SamplingParams(), seed=0)])
    await client.engine_core.stop()


async def test_sleep_and_wake_up_apply_to_all_replicas() -> None:
    client = await started(2)
    weights = Weights(client)
    callers = [Caller(client, [f"good-{i}"]) for i in range(4)]
    await settle()
    for number in (0, 1):
        process = process_of(client, number)
        assert process is not None
        process.step(9)
    await settle()
    await weights.sleep()
    assert client.engine_core.asleep
    assert all(each.asleep for each in client.engine_core._replicas)
    assert not client.responsive
    assert client.healthy
    callers.append(Caller(client, ["later"]))
    await settle()
    assert len(client.engine_core._unplaced) == 1, "nobody can compute it"
    await weights.wake_up()
    assert not client.engine_core.asleep
    await compute(client)
    await settle()
    for each in callers:
        each.check()
    await client.engine_core.stop()


async def test_replica_that_dies_during_update_loads_weights_after_restart() -> None:
    client = await started(2, Launcher(FakeProcess, backoff=[0.3]))
    weights = Weights(client)
    silent = process_of(client, 0)
    assert silent is not None
    silent.answers = False
    change = asyncio.create_task(weights.update("/"))
    for _ in range(50):
        await asyncio.sleep(0)
        under_way = client.engine_core._replicas[0]._change
        if under_way is not None and under_way.version == "2":  # not the check that precedes the update
            break
    kill(client, 0, CRASHED)
    assert await change == "2"
    assert [each.weights_version for each in client.engine_core._replicas] == ["2", "2"]
    kill(client, 0)
    await settle()
    with pytest.raises(Overloaded, match="being replaced"):
        await weights.sleep()
    assert not any(each.asleep for each in client.engine_core._replicas)
    await client.engine_core.stop()


async def test_router_forgets_prefixes_of_dead_replica() -> None:
    client = await started(2)
    forgotten: list[int] = []
    client.engine_core._router.forget = forgotten.append  # type: ignore[method-assign]
    kill(client, 1)
    await settle()
    assert forgotten == [1]
    client.engine_core.reset_prefix_cache()
    assert forgotten == [1, 0, 1]
    await client.engine_core.stop()


async def test_replicas_use_shortest_max_model_len() -> None:
    """Memory fits may differ, but a request's tokens and its end must not depend on the replica that computes it."""
    lengths, loaded = [100, 80, 90], []

    class Fitted(FakeProcess):
        def connect(self) -> None:
            self._sent.put_nowait(engine_started(msgspec.structs.replace(INFO, max_model_len=lengths.pop(0))))

        def send(self, message: ToEngine) -> None:
            if isinstance(message, UtilityCall) and message.method == "load_weights":
                config = decode_arguments(EngineCoreMethods, message)["config"]
                loaded.append(EngineConfig.model_validate_json(config).max_model_len)
            super().send(message)

    client = processes(EngineConfig(data_parallel_size=3), Launcher(Fitted))
    info = await client.engine_core.start()
    assert info.max_model_len == 80
    assert loaded == [80, 80]
    assert client.responsive
    await client.engine_core.stop()


async def test_start_fails_when_replica_cannot_start() -> None:
    client = processes(EngineConfig(data_parallel_size=2), Launcher(Unstartable))
    with pytest.raises(ConfigError, match="there is no room"):
        await client.engine_core.start()
    assert not client.alive


def test_single_engine_uses_process_client() -> None:
    client = processes(EngineConfig())
    assert isinstance(client.engine_core, ProcessClient)
    assert LENGTH > 4, "so that requests are cleared before they end"
