"""Large bodies with unread or background answers, and growing conversations, leave the server's memory bounded, its
event loop free and other clients served.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from benchmarks.attacks import ASKED, CHAT, COMPLETIONS, RESPONSES, TOKENIZE, Attack, encoded
from tests.e2e.hostile import MAX_BLOCK, MAX_GROWTH, TENANTS, Watched, honest, watched_server

pytestmark = pytest.mark.slow

CONVERSATIONS = "/v1/conversations"
CALLERS = 64
TOOLS = [{"type": "function", "function": {"name": f"f{i}", "description": "d" * 10_000}} for i in range(1000)]


def large_response_body(size: int, **fields: Any) -> dict[str, Any]:
    """A Responses body whose answer repeats a tool description of `size` characters."""
    tool = {"type": "function", "name": "f", "description": "d" * size}
    return {"input": "Hi", "tools": [tool], "tool_choice": "none", "max_output_tokens": 50, **fields}


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"messages": ASKED, "stream": True, "max_tokens": 50, **fields}


HELD = [
    Attack("a response that repeats 14 MB", RESPONSES, lambda: large_response_body(14_000_000, stream=True)),
    Attack("a response, streamed", RESPONSES, lambda: large_response_body(900_000, stream=True), (200,)),
    Attack("one in the background", RESPONSES, lambda: large_response_body(900_000, background=True), (200,)),
    Attack("a response", RESPONSES, lambda: large_response_body(900_000), (200,)),
    Attack(
        "one in the background that repeats 14 MB", RESPONSES, lambda: large_response_body(14_000_000, background=True)
    ),
    Attack(
        "one in the background, streamed",
        RESPONSES,
        lambda: large_response_body(900_000, background=True, stream=True),
        (200,),
    ),
    Attack("a chat with tools that it may not call", CHAT, lambda: chat_body(tools=TOOLS, tool_choice="none"), (200,)),
    Attack("a message", "/v1/messages", lambda: chat_body(metadata={"user_id": "u" * 9_000_000}), (200,)),
    Attack(
        "a completion of some of the tokens",
        COMPLETIONS,
        lambda: {"prompt": "a", "allowed_token_ids": [900] * 500_000, "stream": True, "max_tokens": 50},
        (200,),
    ),
    Attack("texts of tokens", TOKENIZE, lambda: {"prompt": "a b " * 15_000, "return_token_strs": True}, (200,)),
]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A server that stores responses."""
    folder = tmp_path_factory.mktemp("held")
    with watched_server(folder, "--data-dir", str(folder / "data")) as server:
        with server.client(TENANTS[-1]) as http:  # start processes that start once
            http.post(RESPONSES, json={"input": "Hi " * 3000, "max_output_tokens": 1, "truncate_prompt_tokens": 9})
        yield server


@asynccontextmanager
async def open_unread_response(server: Watched, path: str, body: bytes, key: str) -> AsyncIterator[int]:
    """Send a request and yield its status; the rest of the answer stays unread until the block ends."""
    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", server.port))
        reader, writer = await asyncio.open_connection(sock=plain, limit=1024)
        lines = [
            f"POST {path} HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            f"Authorization: Bearer {key}",
        ]
        writer.write("\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body)
        try:
            yield int((await asyncio.wait_for(reader.readline(), 60)).split()[1])
        finally:
            writer.transport.abort()


@pytest.mark.parametrize("attack", HELD, ids=lambda attack: attack.name)
def test_unread_answers_to_large_bodies_keep_memory_bounded(watched: Watched, attack: Attack) -> None:
    body, before = encoded(attack), watched.peak()
    statuses = asyncio.run(hold_answers_open(watched, attack, body))
    assert watched.peak() - before < MAX_GROWTH
    (expected_status,) = attack.statuses
    assert expected_status in statuses
    assert statuses <= {expected_status, 408, 503}
    deadline = time.monotonic() + 60
    headers = {"Content-Type": "application/json"}
    with watched.client(TENANTS[0]) as http:
        while (answer := http.post(attack.path, content=body, headers=headers)).status_code != expected_status:
            assert time.monotonic() < deadline, f"what was held is not given back: {answer.text}"
            time.sleep(0.2)


async def hold_answers_open(server: Watched, attack: Attack, body: bytes) -> set[int]:
    done, enough, answered = asyncio.Event(), asyncio.Event(), asyncio.Semaphore(0)
    others = asyncio.create_task(honest(server, done))
    statuses: list[int] = []

    async def one(key: str) -> None:
        async with open_unread_response(server, attack.path, body, key) as status:
            statuses.append(status)
            answered.release()
            await enough.wait()

    callers = [asyncio.create_task(one(TENANTS[i % (len(TENANTS) - 1)])) for i in range(CALLERS)]
    async with asyncio.timeout(90):
        for _ in callers:
            await answered.acquire()
    await asyncio.sleep(2)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:  # a larger body of another key
        headers = {"Authorization": f"Bearer {TENANTS[-1]}"}
        sent = {"prompt": "a", "max_tokens": 1, "user": "u" * 200_000}
        (await http.post(COMPLETIONS, json=sent, headers=headers)).raise_for_status()
    enough.set()
    await asyncio.gather(*callers)
    done.set()
    assert await others > 0
    return set(statuses)


def test_growing_conversation_does_not_block_event_loop(watched: Watched) -> None:
    before, began = watched.peak(), time.monotonic()
    asyncio.run(grow_conversation(watched))
    assert watched.peak() - before < MAX_GROWTH
    assert watched.longest_block(began) < MAX_BLOCK


async def grow_conversation(server: Watched) -> None:
    """Add five messages of 10,000 empty parts until the conversation is full, then read it."""
    done = asyncio.Event()
    others = asyncio.create_task(honest(server, done))
    parts = [{"type": "input_text", "text": ""}] * 10_000
    items = {"items": [{"role": "user", "content": parts}] * 5}
    headers = {"Authorization": f"Bearer {TENANTS[0]}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as http:
        talk: dict[str, Any] = (await http.post(CONVERSATIONS, json={})).json()
        path = f"{CONVERSATIONS}/{talk['id']}"
        statuses = [(await http.post(f"{path}/items", json=items)).status_code for _ in range(12)]
        assert (statuses[:9], statuses[-1]) == ([200] * 9, 400), "16 MiB are full"
        for _ in range(10):
            assert (await http.get(path)).json()["id"] == talk["id"]
            assert (await http.get(f"{path}/items", params={"limit": 1})).is_success
        assert (await http.delete(path)).is_success
    done.set()
    assert await others > 0
