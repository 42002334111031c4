"""ProcessClient loses, repeats and changes no token while fake engine processes end at random moments."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_process import Launcher
from quire.engine.client.process_client import ProcessClient
from quire.engine.common.config import EngineConfig
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreRequest
from tests.engine.fake_process import INFO, KILLED, LENGTH, Caller, FakeProcess, settle, started, token
from tests.tiers import examples

ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 3)),
    st.tuples(st.just("submit killers"), st.integers(1, 2)),
    st.tuples(st.just("abort"), st.integers(0, 99)),
    st.tuples(st.just("step"), st.integers(1, 9)),
    st.tuples(st.just("step without delivery"), st.integers(1, 9)),
    st.tuples(st.just("kill"), st.just(0)),
    st.tuples(st.just("settle"), st.just(0)),
)


async def run(actions: list[tuple[str, int]]) -> None:
    client = EngineClient(ProcessClient(EngineConfig(), launcher=Launcher(FakeProcess)))
    await client.engine_core.start()
    callers: list[Caller] = []
    for number, (action, value) in enumerate(actions):
        process = client.engine_core._process
        match action:
            case "submit" | "submit killers":
                name = "killer" if action == "submit killers" else "good"
                callers.append(Caller(client, [f"{name}-{number}-{i}" for i in range(value)]))
            case "abort" if callers:
                callers[value % len(callers)].abort(value)
            case "step" | "step without delivery" if isinstance(process, FakeProcess):
                process.step(value)
            case "kill" if isinstance(process, FakeProcess):
                process.exit(KILLED)
        if action not in ("step without delivery", "kill"):
            await settle()
    for _ in range(2000):
        if not client.num_open:
            break
        if isinstance(client.engine_core._process, FakeProcess):
            client.engine_core._process.step(9)
        else:
            await asyncio.sleep(0.005)  # after engines that crashed with nothing to compute, the next one starts later
        await settle()
    await settle()
    for caller in callers:
        caller.check()
    assert client.alive
    assert not client.num_open
    assert client.engine_core._replay.idle
    assert client.engine_core._replay.take_ready() == []
    await client.engine_core.stop()


@settings(deadline=None, max_examples=examples(300))
@given(st.lists(ACTIONS, max_size=40))
def test_streams_are_complete_after_random_engine_deaths(actions: list[tuple[str, int]]) -> None:
    asyncio.run(run(actions))


async def test_only_first_engine_warms_up_before_ready() -> None:
    """A replacement skips warmup because open streams wait for it."""
    seconds: list[float] = []

    class Noted(FakeProcess):
        def __init__(self, config: EngineConfig, *rest: Any) -> None:
            super().__init__(config, *rest)
            seconds.append(config.warmup_seconds)

    client = EngineClient(ProcessClient(EngineConfig(warmup_seconds=20.0), launcher=Launcher(Noted)))
    await client.engine_core.start()
    for _ in range(2):
        assert isinstance(client.engine_core._process, Noted)
        client.engine_core._process.exit(KILLED)
        await settle()
        for _ in range(200):
            if client.alive and client.engine_core.ready:
                break
            await asyncio.sleep(0.005)
    await client.engine_core.stop()
    assert seconds == [20.0, 0.0, 0.0]


async def test_engine_client_dies_if_weights_changed_across_restart() -> None:
    """For example, the model's folder was overwritten while it was served."""
    contents = ["one", "one", "two"]

    class Overwritten(FakeProcess):
        def connect(self) -> None:
            self._sent.put_nowait(started(msgspec.structs.replace(INFO, content=contents.pop(0))))

    client = EngineClient(ProcessClient(EngineConfig(), launcher=Launcher(Overwritten)))
    await client.engine_core.start()
    for left in (1, 0):
        assert client.alive
        assert isinstance(client.engine_core._process, Overwritten)
        client.engine_core._process.exit(KILLED)
        async with asyncio.timeout(10):
            while len(contents) > left or (client.alive and not client.engine_core.ready):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await settle()
    assert not client.alive
    await client.engine_core.stop()


async def test_outputs_of_pending_steps_reach_reader_merged() -> None:
    """A server that falls behind its engine thereby sends fewer and larger chunks."""
    client = EngineClient(ProcessClient(EngineConfig(), launcher=Launcher(FakeProcess)))
    await client.engine_core.start()
    params = SamplingParams(max_tokens=LENGTH)
    stream = client.submit([EngineCoreRequest(id="a", prompt_ids=[1], params=params, seed=0)])
    await settle()
    process = client.engine_core._process
    assert isinstance(process, FakeProcess)
    for _ in range(4):
        process.step(1)
    (first,) = await anext(stream)
    assert first.new_ids == [token("a", position) for position in range(4)]
    process.step(1)
    (second,) = await anext(stream)
    assert second.new_ids == [token("a", 4)]
    await client.engine_core.stop()
