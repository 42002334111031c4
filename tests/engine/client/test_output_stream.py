"""A stream's sink takes outputs at once while its reader waits; the reader gets all others."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.output_stream import OutputStream
from quire.engine.common.config import EngineConfig
from quire.engine.common.types import EngineCoreOutput, FinishReason
from quire.engine.offline.in_process_client import InProcessClient
from tests.engine.harness import request

PROMPT = [3, 4, 5]


class Client(EngineClient):
    """An engine client without an engine: the test delivers outputs."""

    def __init__(self) -> None:
        super().__init__(InProcessClient(EngineConfig(model="none")))

    def step(self, *ids: str, token: int = 1, ends: FinishReason | None = None) -> None:
        self.deliver([EngineCoreOutput(each, [token], finish_reason=ends) for each in ids])


class Reader:
    """Reads a stream from a task and sets a sink; records the tokens that each of them gets."""

    def __init__(self, stream: OutputStream) -> None:
        self.read: list[list[int]] = []
        self.taken: list[list[int]] = []
        self.ready = True
        self.error: Exception | None = None
        self.stream = stream
        stream.sink = self
        self.task = asyncio.create_task(self._run())

    def can_take_outputs(self) -> bool:
        return self.ready

    def take_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        if self.error is not None:
            raise self.error
        self.taken.append([token for output in outputs for token in output.new_ids])

    async def _run(self) -> None:
        async for outputs in self.stream:
            self.read.append([token for output in outputs for token in output.new_ids])


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_sink_takes_what_came_in_a_turn_and_the_reader_the_end() -> None:
    client = Client()
    reader = Reader(client.submit([request("a", PROMPT), request("b", PROMPT)]))
    await turns()
    client.step("a", "b", token=1)
    client.step("a", token=2)
    await turns()
    assert (reader.taken, reader.read) == ([[1, 2, 1]], []), "merged by request"
    client.step("a", token=3, ends="length")
    await turns()
    assert (reader.taken[1:], reader.read) == ([[3]], []), "the other goes on"
    client.step("b", token=4, ends="length")
    await reader.task
    assert (reader.taken[2:], reader.read) == ([], [[4]])


async def test_what_the_sink_refuses_is_the_readers_in_order() -> None:
    client = Client()
    reader = Reader(client.submit([request("a", PROMPT)]))
    await turns()
    reader.ready = False
    client.step("a", token=1)
    await turns()
    reader.ready = True
    client.step("a", token=2)
    await turns()
    client.step("a", token=3, ends="stop")
    await reader.task
    assert (reader.taken, reader.read) == ([[2]], [[1], [3]])


async def test_an_error_of_the_sink_is_the_readers_alone() -> None:
    client = Client()
    broken, whole = Reader(client.submit([request("a", PROMPT)])), Reader(client.submit([request("b", PROMPT)]))
    await turns()
    broken.error = ValueError("no")
    client.step("a", "b")
    client.step("a", "b")
    with pytest.raises(ValueError, match="no"):
        await broken.task
    assert whole.taken == [[1, 1]]
    assert client.num_open == 1
    whole.stream.close()
    await whole.task


async def test_an_abort_between_a_step_and_its_turn_reaches_the_reader() -> None:
    client = Client()
    reader = Reader(client.submit([request("a", PROMPT)]))
    await turns()
    client.step("a")
    client.cancel("a")
    await reader.task
    assert (reader.taken, reader.read) == ([], [[1]])


async def test_a_journal_has_tokens_before_readers_do() -> None:
    client, rows, ends = Client(), list[int](), list[tuple[list[int], bool]]()
    before, made = [[8, 9], [1]], [request("a", PROMPT), request("b", PROMPT)]
    requests = [msgspec.structs.replace(each, emitted_ids=[*ids]) for each, ids in zip(made, before, strict=True)]
    stream = client.submit(requests, "call", before)
    reader = Reader(stream)
    stream.ended = lambda output, with_tokens: ends.append((output.new_ids, with_tokens))
    await turns()
    client.step("a", "b", token=5)
    assert rows == [], "nobody asked for it so far"
    client.keep("a", 40, rows.extend)
    client.keep("b", 41, rows.extend)
    client.keep("none", 42, rows.extend)
    client.step("a", "b", token=6)
    client.step("b", token=7)
    assert rows == [40, 3, 6, 41, 2, 6, 41, 3, 7]
    assert (reader.taken, reader.read) == ([], [])
    assert before == [[8, 9, 5, 6], [1, 5, 6, 7]], "the lists grow"
    assert client.request("a").emitted_ids == before[0], "what another engine goes on from"
    await turns()
    client.step("a", token=4, ends="length")
    client.deliver([EngineCoreOutput("b", [], finish_reason="stop")])
    assert ends == [([4], True), ([], False)]
    assert before[0][-1] == 4
    assert len(rows) == 9, "the end is told with its tokens"
    await reader.task
