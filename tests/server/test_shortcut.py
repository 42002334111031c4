"""Streams on Quire's HTTP server, whose chunks take the shortcut to the connection, equal whole answers."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest

from quire.server.http.write_batching import BatchingTransport
from tests.server.api import parse_events
from tests.server.fake import FakeEngine, hashed
from tests.server.generation.test_streams import flat, fold
from tests.server.hosted import serving

USER = {"role": "user", "content": "x"}
EOS = 258
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [USER]}),
    (CHAT, {"messages": [USER], "n": 3, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": [USER], "stop": ["ab", "c a"], "return_token_ids": True}),
    (COMPLETIONS, {"prompt": "x", "logprobs": 2, "n": 2}),
    (COMPLETIONS, {"prompt": ["x", "y"], "echo": True, "logprobs": 1}),
    (COMPLETIONS, {"prompt": "x", "stop": "b", "include_stop_str_in_output": True}),
    (COMPLETIONS, {"prompt": "x", "repetition_detection": {"max_pattern_size": 2, "min_count": 2}}),
]
OPTIONS = {"include_usage": True, "continuous_usage_stats": True}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The chunks that took the shortcut."""
    chunks: list[bytes] = []
    write = BatchingTransport.write_chunk

    def record_chunk(self: BatchingTransport, chunk: bytes) -> None:
        chunks.append(chunk)
        write(self, chunk)

    monkeypatch.setattr(BatchingTransport, "write_chunk", record_chunk)
    return chunks


@pytest.mark.few(2)
@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("burst", [1, 3])
async def test_stream_through_shortcut_assembles_to_whole_answer(
    path: str, body: dict[str, Any], burst: int, written: list[bytes]
) -> None:
    body = {**body, "max_tokens": 40, "seed": 3}
    ids = [*(b"ab c" + "é€".encode()) * 4, EOS]
    engine = FakeEngine(hashed(ids), eos=[EOS], burst=burst, step_seconds=0.001)
    async with serving(engine) as port, httpx.AsyncClient(base_url=port.url) as http:
        whole = (await http.post(path, json=body)).json()
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        events = parse_events((await http.post(path, json=streamed)).text)
    assert events.pop() == "[DONE]"
    choices, usage = fold(events)
    assert usage == whole["usage"]
    assert choices == [flat(choice) for choice in whole["choices"]]
    if usage["completion_tokens"] > 2 * burst * len(choices):
        assert bool(written) != ("echo" in body), "a step with the prompt's log probabilities has a thread"


async def test_continuous_usage_counts_each_token(written: list[bytes]) -> None:
    body = {"prompt": "x", "max_tokens": 30, "stream": True, "stream_options": OPTIONS}
    async with (
        serving(FakeEngine(hashed(b"abc"), step_seconds=0.001)) as port,
        httpx.AsyncClient(base_url=port.url) as http,
    ):
        events = parse_events((await http.post(COMPLETIONS, json=body)).text)[:-1]
    text = ""
    for event in events:
        text += "".join(choice["text"] for choice in event["choices"])
        assert event["usage"]["completion_tokens"] == len(text)
    assert len(text) == 30
    assert written


async def test_messages_and_responses_stream_through_shortcut(written: list[bytes]) -> None:
    messages_body = {"model": "second", "max_tokens": 30, "messages": [USER]}
    async with (
        serving(FakeEngine(hashed(b"abc"), step_seconds=0.001)) as port,
        httpx.AsyncClient(base_url=port.url) as http,
    ):
        for path, body, kind in (
            ("/v1/messages", messages_body, "content_block_delta"),
            ("/v1/responses", {"input": "x", "max_output_tokens": 30}, "response.output_text.delta"),
        ):
            written.clear()
            answer = (await http.post(path, json={**body, "stream": True})).text
            lines = [line[6:] for line in answer.split("\n") if line.startswith("data: {")]
            deltas = [event["delta"] for event in map(json.loads, lines) if event["type"] == kind]
            assert len("".join(each if isinstance(each, str) else each["text"] for each in deltas)) == 30
            assert written


@pytest.mark.slow
async def test_slow_reader_gets_all_events_in_order(written: list[bytes]) -> None:
    """Events that come while the connection is full wait in the stream, are merged, and are sent by its task."""
    fields = {"max_tokens": 6_000, "stream": True, "logprobs": True, "top_logprobs": 20}
    content = json.dumps({"messages": [USER], **fields}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += b"Content-Type: application/json\r\n"
    engine = FakeEngine(lambda request, at: b"abcdefghij"[at % 10], burst=100, max_model_len=2**15)
    async with serving(engine) as port:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port.number))
        reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        await reader.readuntil(b"\r\n\r\n")
        async with asyncio.timeout(20):
            while engine.running or not engine.seen:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        answer = b""
        while part := await asyncio.wait_for(reader.read(65536), 20):
            answer += part
        writer.close()
    body = b""
    while answer:
        size, _, rest = answer.partition(b"\r\n")
        body, answer = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    events = parse_events(body.decode())
    assert events.pop() == "[DONE]"
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "abcdefghij" * 600
    assert len(events) < 60, "some were merged"
    assert written
