"""Hostile, broken and foreign WebSocket clients on real sockets cost nobody else anything."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import websocket

from quire.server.access.body_reader import BodyReader, BodyTimeouts
from quire.server.access.memory_lease import MemoryLease
from quire.server.http.websocket import WebSocketConnection
from quire.server.resolve.other_apis.history import CachedResponse
from quire.server.routes.websocket.client_events import CreateEvent
from quire.server.routes.websocket.lanes import Lane, Lanes
from quire.server.shared_capacity import SharedCapacity
from tests.server.api import NAME
from tests.server.fake import FakeEngine, hashed, scripted
from tests.server.hosted import Port, idle, serving
from tests.server.http.test_connection import metric, statuses
from tests.server.websocket_client import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    HandshakeRefused,
    Socket,
    connect,
    frame,
    handshake,
    open_websocket,
)

LETTERS = hashed(b"abcdefgh")
PATH = "/v1/responses"
CREATE = json.dumps({"type": "response.create", "model": NAME, "input": "Hi", "max_output_tokens": 3}).encode()
HEAD = struct.pack("!BBQ", 0x80 | TEXT, 0x80 | 127, 2**62) + b"\0\0\0\0"
"""Header of a frame of four exabytes."""
HOSTILE = {
    "an unmasked frame": ([frame(TEXT, CREATE, mask=b"")], 1002),
    "reserved bits": ([bytes([0xF1]) + frame(TEXT, CREATE)[1:]], 1002),
    "an unknown opcode": ([frame(5, b"")], 1002),
    "a fragmented ping": ([frame(PING, b"", end=False)], 1002),
    "a long ping": ([frame(PING, b"x" * 126)], 1002),
    "a continuation of nothing": ([frame(CONTINUATION, b"x")], 1002),
    "two messages at once": ([frame(TEXT, b"{", end=False), frame(TEXT, b"}")], 1002),
    "invalid UTF-8": ([frame(TEXT, b'"\xff"')], 1007),
    "a closing frame of one byte": ([frame(CLOSE, b"x")], 1002),
    "a closing frame with a forbidden code": ([frame(CLOSE, struct.pack("!H", 1005))], 1002),
    "a huge frame": ([HEAD, b" " * 2**21], 1009),
    "a huge message in fragments": ([frame(TEXT, b"", end=False), *[frame(0, b" " * 2**18, end=False)] * 9], 1009),
    "many pings": ([frame(PING, b"")] * 10_001, 1008),
    "many pongs": ([frame(PONG, b"")] * 10_001, 1008),
    "many empty fragments": ([frame(TEXT, b"", end=False), *[frame(CONTINUATION, b"", end=False)] * 10_001], 1008),
    "many wrong events": ([frame(TEXT, b"{}")] * 101, 1008),
    "many empty messages": ([frame(TEXT, b"")] * 2000, 1008),
    "binary messages": ([frame(BINARY, b"\0" * 100)] * 101, 1008),
}
"""Frames, and the close code that they cause."""


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_frames_close_their_own_connection(name: str) -> None:
    frames, code = HOSTILE[name]
    async with serving(FakeEngine(LETTERS), max_body_size=1) as port, open_websocket(port.number) as other:
        await other.create(model=NAME, input="Hi", max_output_tokens=3)
        async with open_websocket(port.number) as hostile:
            sending = asyncio.create_task(hostile.send_frames(b"".join(frames)))
            assert await hostile.wait_closed() in (code, 1006), "1006: the close frame may be lost"
            await sending
        assert (await other.events())[-1]["type"] == "response.incomplete"
        assert (await other.answer(model=NAME, input="Hi", max_output_tokens=3))["status"] == "incomplete"


async def test_pings_between_fragments_are_answered_and_small_frames_allowed() -> None:
    async with serving(FakeEngine(LETTERS)) as port, open_websocket(port.number) as client:
        await client.send_frames(frame(PING, b"are you there?"))
        assert await client.receive_frame() == (PONG, b"are you there?")
        pieces = [frame(CONTINUATION, bytes([each]), end=False) for each in CREATE[1:]]
        await client.send_frames(frame(TEXT, CREATE[:1], end=False), frame(PING, b"1"), *pieces, frame(0, b" "))
        assert await client.receive_frame() == (PONG, b"1")
        assert (await client.events())[-1]["type"] == "response.incomplete"
        await client.send_frames(frame(CLOSE, struct.pack("!H", 1000) + b"bye"))
        assert await client.receive_frame() == (CLOSE, struct.pack("!H", 1000) + b"bye")


@pytest.mark.parametrize("small", [frame(PING, b""), frame(CONTINUATION, b"", end=False)])
async def test_other_connections_are_served_between_small_frames(small: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    turn, frames_by_turn = 0, Counter[int]()

    def counted(handle: Callable[[WebSocketConnection, Any], None]) -> Callable[[WebSocketConnection, Any], None]:
        def count_and_handle(connection: WebSocketConnection, event: Any) -> None:
            frames_by_turn[turn] += 1
            handle(connection, event)

        return count_and_handle

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    for name in ("handle_ping", "handle_message"):
        monkeypatch.setattr(WebSocketConnection, name, counted(getattr(WebSocketConnection, name)))
    async with serving(FakeEngine(LETTERS)) as port, open_websocket(port.number) as client:
        counting = asyncio.create_task(count_turns())
        await client.send_frames(frame(TEXT, CREATE[:-1], end=False), small * 9000, frame(CONTINUATION, CREATE[-1:]))
        assert (await client.events())[-1]["type"] == "response.incomplete"
        counting.cancel()
    assert frames_by_turn.total() > 9000
    assert max(frames_by_turn.values()) < 3000


async def test_too_large_message_is_refused_with_the_limit_of_bodies() -> None:
    async with serving(FakeEngine(LETTERS), max_body_size=1) as port, open_websocket(port.number) as client:
        fits = json.dumps({"type": "response.create", "model": NAME, "input": "Hi", "max_output_tokens": 3}).encode()
        await client.send_frames(frame(TEXT, fits + b" " * (2**20 - len(fits))))
        assert (await client.events())[-1]["type"] == "response.incomplete"
        await client.send_frames(frame(TEXT, fits + b" " * 2**20))
        error = await client.receive()
        assert (error["status"], "--max-body-size" in error["error"]["message"]) == (413, True)
        assert await client.wait_closed() == 1009


async def test_message_is_refused_when_other_bodies_use_all_memory() -> None:
    async with serving(FakeEngine(LETTERS)) as port:
        app: Any = port.server.config.app
        reader = BodyReader(300_000, 300_000, BodyTimeouts(wait_seconds=0.3, check_interval=0.1))
        app.state.server = replace(app.state.server, body_reader=reader)
        async with open_websocket(port.number) as other, open_websocket(port.number) as client:
            await other.send_frames(frame(TEXT, CREATE[:-1], end=False), frame(0, b" " * 200_000, end=False))
            while not reader.reserved_bytes:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await client.send_frames(frame(TEXT, CREATE + b" " * 200_000), frame(TEXT, CREATE))
            assert (await client.receive())["status"] == 503
            assert (await client.events())[-1]["type"] == "response.incomplete"


async def leave_unread(port: Port, **body: Any) -> Socket:
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port.number))
        reader, writer = await asyncio.open_connection(sock=raw.dup(), limit=4096)
    writer.write(handshake(PATH))
    await reader.readuntil(b"\r\n\r\n")
    client = Socket(reader, writer, {})
    await client.create(model=NAME, input="Hi", **body)
    return client


@pytest.mark.slow
async def test_client_that_does_not_read_is_cut_off_after_write_timeout() -> None:
    engine = FakeEngine(LETTERS, max_model_len=10**9)
    async with serving(engine, write_timeout=0.5) as port:
        client = await leave_unread(port, max_output_tokens=10**9 - 100)
        await client.send_frames(*[frame(PING, b"x" * 100)] * 5000)
        await idle(engine)
        assert engine.aborted == [engine.seen[0].id]
        assert await metric(port.url, "quire:slow_readers_total") == 1
        client.writer.close()


async def test_client_that_answers_no_pings_stays_while_its_machine_acknowledges_them() -> None:
    """A simple client answers pings only while it waits for a response. Its kernel always acknowledges them, so the
    server's kernel ends only connections to machines that are gone.
    """
    async with serving(FakeEngine(LETTERS)) as port:
        port.server.config.ws_ping_interval = 0.02
        async with open_websocket(port.number) as client:
            await asyncio.sleep(0.3)
            (connection,) = port.server.server_state.connections
            accepted = cast(WebSocketConnection, connection).transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
            assert [(await client.receive_frame())[0] for _ in range(5)] == [PING] * 5
            assert (await client.answer(model=NAME, input="Hi", max_output_tokens=3))["status"] == "incomplete"


ORIGINS = {
    "none": ([], True),
    "its own": (["Origin: http://127.0.0.1"], True),
    "its own behind a proxy with TLS": (["Origin: https://127.0.0.1"], True),
    "an allowed one": (["Origin: https://a.example"], True),
    "another": (["Origin: https://b.example"], False),
    "another scheme of an allowed one": (["Origin: http://a.example"], False),
    "one with the same ending": (["Origin: https://x127.0.0.1"], False),
    "another port": (["Origin: http://127.0.0.1:81"], False),
    "a sandboxed page's": (["Origin: null"], False),
    "an empty one": (["Origin: "], False),
    "two": (["Origin: http://127.0.0.1", "Origin: https://b.example"], False),
}


async def test_pages_of_foreign_origins_open_no_websocket() -> None:
    async with serving(FakeEngine(LETTERS), allowed_origins=["https://a.example"]) as port:
        for name, (headers, is_allowed) in ORIGINS.items():
            if is_allowed:
                (await connect(port.number, *headers)).writer.close()
                continue
            with pytest.raises(HandshakeRefused) as refused:
                await connect(port.number, *headers)
            assert (refused.value.status, refused.value.error["code"]) == (403, "origin_not_allowed"), name
        rebound = handshake(PATH, "Origin: http://evil.example", "Connection: close").replace(
            b"Host: 127.0.0.1", b"Host: evil.example"
        )
        answer = await port.send(rebound)
        assert statuses(answer) == [403]
        assert b"host_not_allowed" in answer
    async with serving(FakeEngine(LETTERS), allowed_origins=["*"]) as port:
        (await connect(port.number, "Origin: https://b.example")).writer.close()


async def test_websocket_needs_api_key_and_is_subject_to_its_limits(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[a]\nkey = "first"\nrequests_per_minute = 2\n[b]\nkey = "second"\n')
    async with serving(FakeEngine(LETTERS), api_key_file=keys, data_dir=tmp_path / "data") as port:
        for headers, path in (([], PATH), (["Authorization: Bearer no"], PATH), ([], f"{PATH}?api_key=first")):
            with pytest.raises(HandshakeRefused) as refused:
                await connect(port.number, *headers, path=path)
            assert (refused.value.status, refused.value.error["code"]) == (401, "invalid_api_key")
        with pytest.raises(HandshakeRefused):
            await connect(port.number, "Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.first")
        async with (
            open_websocket(port.number, "Authorization: Bearer first") as first,
            open_websocket(port.number, "x-api-key: second") as second,
        ):
            answers = [await first.answer(model=NAME, input="Hi", max_output_tokens=3) for _ in range(3)]
            assert [each.get("status") for each in answers] == ["incomplete", "incomplete", 429]
            error = answers[-1]["error"]
            assert error["code"] == "rate_limit_exceeded"
            assert {"retry-after", "x-ratelimit-limit-requests"} <= error["headers"].keys()
            foreign = await second.answer(model=NAME, input="Hi", previous_response_id=answers[0]["id"])
            assert foreign["error"]["code"] == "previous_response_not_found"
            async with open_websocket(port.number, "Authorization: Bearer first") as third:
                assert (await third.answer(model=NAME, input="Hi"))["status"] == 429, "the key's, not the connection's"


async def test_number_of_websockets_is_bounded_and_ended_ones_make_room() -> None:
    async with serving(FakeEngine(LETTERS), max_websockets=1) as port:
        app: Any = port.server.config.app
        async with open_websocket(port.number) as client:
            with pytest.raises(HandshakeRefused) as refused:
                await connect(port.number)
            assert (refused.value.status, refused.value.error["code"]) == (503, "overloaded")
            await client.send_frames(frame(CLOSE, struct.pack("!H", 1000)))
            assert await client.wait_closed() == 1000
        async with asyncio.timeout(10):
            while app.state.server.websockets.connections.total_used:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (await connect(port.number)).writer.close()
    async with serving(FakeEngine(LETTERS), max_websockets=0) as port:
        with pytest.raises(HandshakeRefused) as refused:
            await connect(port.number)
        assert refused.value.status == 426


@pytest.mark.parametrize("name", ["Idempotency-Key", "Last-Event-ID"])
async def test_headers_of_one_request_are_refused_when_connecting(name: str) -> None:
    async with serving(FakeEngine(LETTERS)) as port:
        with pytest.raises(HandshakeRefused) as refused:
            await connect(port.number, f"{name}: a")
        assert refused.value.status == 400
        assert refused.value.error["param"].lower() == name.lower()


HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
ORDINARY = {
    "another path": (handshake("/v1/realtime", "Connection: close"), [404]),
    "a path that ends alike": (handshake("/v1/responses/x", "Connection: close"), [404]),
    "an absolute target": (handshake("http://127.0.0.1/v1/responses", "Connection: close"), [405]),
    "HTTP/1.0": (handshake(PATH).replace(b"HTTP/1.1", b"HTTP/1.0"), [405]),
    "no upgrade": (handshake(PATH, "Connection: close").replace(b"Upgrade: websocket\r\n", b""), [405]),
    "no key": (handshake(PATH).replace(b"Sec-WebSocket-Key", b"X-Key"), [400]),
    "another version": (handshake(PATH).replace(b"Version: 13", b"Version: 8"), [426]),
    "after an unanswered request": (HEALTH + handshake(PATH, "Connection: close"), [200, 405]),
}


async def test_broken_handshakes_are_answered_as_http() -> None:
    async with serving(FakeEngine(LETTERS), allowed_hosts=["*"]) as port, httpx.AsyncClient(base_url=port.url) as http:
        for name, (data, expected) in ORDINARY.items():
            assert statuses(await port.send(data)) == expected, name
        assert (await http.get("/health")).status_code == 200


async def test_websocket_below_root_path_is_served() -> None:
    async with serving(FakeEngine(LETTERS), root_path="/llm") as port:
        for path in (PATH, f"/llm{PATH}"):
            async with open_websocket(port.number, path=path) as client:
                assert (await client.answer(model=NAME, input="Hi", max_output_tokens=3))["status"] == "incomplete"


async def test_independent_library_continues_a_conversation() -> None:
    """websocket-client, which OpenAI's guide used first."""

    def talk(url: str) -> list[str]:
        client = websocket.create_connection(url, timeout=30, header=["Authorization: Bearer none"])
        texts: list[str] = []
        create = {"type": "response.create", "model": NAME, "input": "é"}
        for _ in range(2):
            client.send(json.dumps(create))
            while (event := json.loads(client.recv()))["type"] != "response.completed":
                assert event["type"] != "error", event
            create["previous_response_id"] = event["response"]["id"]
            texts.append(event["response"]["output"][0]["content"][0]["text"])
        client.close()
        return texts

    async with serving(FakeEngine(scripted("Ça va.".encode(), 258), eos=[258])) as port:
        assert await asyncio.to_thread(talk, port.url.replace("http", "ws") + PATH) == ["Ça va."] * 2


async def test_memory_of_cached_responses_is_bounded_and_returned() -> None:
    budget = SharedCapacity(1000)
    others = MemoryLease(budget, "", uncounted_bytes=0)
    others.grow_lease(300)

    async def answer(lane: Lane, event: CreateEvent) -> None:
        id, _, size = event.body.decode().partition(" ")
        lanes.cache_response(lane, CachedResponse(id, (b"x" * int(size),), is_stored=False))

    lanes = Lanes(answer, lease := MemoryLease(budget, "", uncounted_bytes=0))
    for lane, id, size in (("1", "resp_1", 200), ("1", "resp_2", 300), ("2", "resp_3", 500)):
        lanes.add_event(CreateEvent(lane, None, f"{id} {size}".encode()))
        await asyncio.gather(*lanes.tasks)
    assert lanes.find_cached_response("resp_1") is None, "the lane has a newer response"
    assert lanes.find_cached_response("resp_2") is not None
    assert lanes.find_cached_response("resp_3") is None, "there is no room"
    assert budget.total_used == 600
    lease.release_lease()
    assert budget.total_used == 300
