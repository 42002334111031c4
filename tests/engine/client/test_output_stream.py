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


async def run_event_loop() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_sink_takes_merged_outputs_and_reader_takes_last_output() -> None:
    client = Client()
    reader = Reader(client.submit([request("a", PROMPT), request("b", PROMPT)]))
    await run_event_loop()
    client.step("a", "b", token=1)
    client.step("a", token=2)
    await run_event_loop()
    assert (reader.taken, reader.read) == ([[1, 2, 1]], []), "merged by request"
    client.step("a", token=3, ends="length")
    await run_event_loop()
    assert (reader.taken[1:], reader.read) == ([[3]], []), "the other goes on"
    client.step("b", token=4, ends="length")
    await reader.task
    assert (reader.taken[2:], reader.read) == ([], [[4]])


async def test_reader_gets_outputs_in_order_when_sink_is_not_ready() -> None:
    client = Client()
    reader = Reader(client.submit([request("a", PROMPT)]))
    await run_event_loop()
    reader.ready = False
    client.step("a", token=1)
    await run_event_loop()
    reader.ready = True
    client.step("a", token=2)
    await run_event_loop()
    client.step("a", token=3, ends="stop")
    await reader.task
    assert (reader.taken, reader.read) == ([[2]], [[1], [3]])


async def test_sink_error_fails_only_its_reader() -> None:
    client = Client()
    broken, whole = Reader(client.submit([request("a", PROMPT)])), Reader(client.submit([request("b", PROMPT)]))
    await run_event_loop()
    broken.error = ValueError("no")
    client.step("a", "b")
    client.step("a", "b")
    with pytest.raises(ValueError, match="no"):
        await broken.task
    assert whole.taken == [[1, 1]]
    assert client.num_open == 1
    whole.stream.close()
    await whole.task


async def test_reader_gets_pending_tokens_of_cancelled_request() -> None:
    client = Client()
    reader = Reader(client.submit([request("a", PROMPT)]))
    await run_event_loop()
    client.step("a")
    client.cancel("a")
    await reader.task
    assert (reader.taken, reader.read) == ([], [[1]])


async def test_journal_records_tokens_before_reader_gets_outputs() -> None:
    client, rows, ends = Client(), list[int](), list[tuple[list[int], bool]]()
    emitted_ids, new_requests = [[8, 9], [1]], [request("a", PROMPT), request("b", PROMPT)]
    requests = [
        msgspec.structs.replace(each, emitted_ids=[*ids]) for each, ids in zip(new_requests, emitted_ids, strict=True)
    ]
    stream = client.submit(requests, "call", emitted_ids)
    reader = Reader(stream)
    stream.ended = lambda output, with_tokens: ends.append((output.new_ids, with_tokens))
    await run_event_loop()
    client.step("a", "b", token=5)
    assert rows == [], "nobody asked for it so far"
    client.keep("a", 40, rows.extend)
    client.keep("b", 41, rows.extend)
    client.keep("none", 42, rows.extend)
    client.step("a", "b", token=6)
    client.step("b", token=7)
    assert rows == [40, 3, 6, 41, 2, 6, 41, 3, 7]
    assert (reader.taken, reader.read) == ([], [])
    assert emitted_ids == [[8, 9, 5, 6], [1, 5, 6, 7]], "the lists grow"
    assert client.request("a").emitted_ids == emitted_ids[0], "what another engine goes on from"
    await run_event_loop()
    client.step("a", token=4, ends="length")
    client.deliver([EngineCoreOutput("b", [], finish_reason="stop")])
    assert ends == [([4], True), ([], False)]
    assert emitted_ids[0][-1] == 4
    assert len(rows) == 9, "the end is told with its tokens"
    await reader.task
