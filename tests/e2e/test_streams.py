"""Streams survive the deaths of all processes and of their connections: readers get the same events as without cuts."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server
from tests.e2e.test_batches import SMALL, kill_all
from tests.server.cli.processes import needs_proc

WORDS = ["moon", "tide", "stone", "bird", "lamp", "river"]
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def call(number: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a stream."""
    rng = random.Random(number)
    text = " ".join(rng.choices(WORDS, k=rng.randrange(2, 20)))
    body: dict[str, Any] = {"model": "quire-demo", "stream": True, "seed": number, "temperature": rng.choice([0, 1])}
    messages = [{"role": "user", "content": text}]
    most = rng.randrange(40, 200)
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": messages, "max_tokens": most}),
        ("/v1/chat/completions", {"messages": messages, "max_tokens": most, "n": 2}),
        ("/v1/chat/completions", {"messages": messages, "max_tokens": most, "logprobs": True, "top_logprobs": 1}),
        (
            "/v1/chat/completions",
            {"messages": messages, "max_tokens": most, "response_format": {"type": "json_object"}},
        ),
        (
            "/v1/chat/completions",
            {"messages": messages, "max_tokens": most, "tools": [{"type": "function", "function": ADD}]},
        ),
        ("/v1/completions", {"prompt": text, "max_tokens": most}),
        ("/v1/responses", {"input": text, "max_output_tokens": most}),
        ("/v1/messages", {"messages": messages, "max_tokens": most}),
    ]
    path, more = kinds[number % len(kinds)]
    return path, body | more


@dataclass
class Reader:
    """Reads one stream to its end from whichever server is running."""

    number: int
    cuts: random.Random
    events: list[bytes] = field(default_factory=list)
    last: str = ""
    resumed: int = 0

    async def read(self, url: list[str]) -> None:
        path, body = call(self.number)
        while not self._ended():
            try:
                async with httpx.AsyncClient(base_url=url[0], timeout=60) as http:
                    await self._some(http, path, body)
            except httpx.TransportError:
                await asyncio.sleep(0.2)

    async def _some(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
        """Read until the stream is cut, by the reader at random or by the server's end."""
        how = "POST", path
        if self.last and self.cuts.random() < 0.5:
            how = "GET", f"/v1/streams/{self.last.partition(':')[0]}"
        headers = {"Last-Event-ID": self.last} if self.last else {}
        self.resumed += bool(self.last)
        most = self.cuts.choice([3, 8, 20, 10_000])
        async with http.stream(*how, json=body if how[0] == "POST" else None, headers=headers) as answer:
            if answer.status_code == 503:
                raise httpx.ReadError("not now")
            assert answer.status_code == 200, await answer.aread()
            left = b""
            async for piece in answer.aiter_bytes():
                *whole, left = (left + piece).split(b"\n\n")
                for event in whole:
                    if found := re.match(rb"id: (.*)\n", event):
                        self.last = found[1].decode()
                        self.events.append(event)
                        most -= 1
                if most <= 0:
                    return

    def _ended(self) -> bool:
        return bool(self.events) and self.last.rpartition(".")[2] != "0"


async def read_all(url: list[str], count: int, cuts: int) -> list[Reader]:
    readers = [Reader(number, random.Random(f"{cuts} {number}")) for number in range(count)]
    async with asyncio.timeout(900), asyncio.TaskGroup() as group:
        for reader in readers:
            group.create_task(reader.read(url))
    return readers


def content(reader: Reader) -> dict[int, list[Any]]:
    """Chunks by choice, without fields that differ between requests."""
    chunks: dict[int, list[Any]] = {}
    for event in reader.events:
        data = event.rpartition(b"data: ")[2]
        if data != b"[DONE]":
            normalized = re.sub(rb'"(id|item_id|call_id)":"[^"]*"', b'"id":""', data)
            normalized = re.sub(rb'"(created|created_at|completed_at)":\d+', b'"at":0', normalized)
            normalized = re.sub(
                rb'"(cached_tokens|cache_read_input_tokens|input_tokens)":\d+', b'"cached":0', normalized
            )
            chunk = json.loads(normalized)
            choices = chunk.get("choices")
            chunks.setdefault(choices[0]["index"] if choices else 0, []).append(chunk)
    return chunks


@needs_proc
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("count", "kills", "processes"), [(16, 2, 2), (16, 2, 1), (64, 3, 2)])
async def test_resumed_streams_equal_uncut_streams_after_process_kills(
    count: int, kills: int, processes: int, tmp_path: Path
) -> None:
    """`processes` is the number of API processes; if there are several, one is also killed alone."""
    flags = [*SMALL, "--data-dir", str(tmp_path / "data"), "--api-server-count", str(processes)]
    server = Server(tmp_path / "first.log", *flags)
    url = [server.url]
    try:
        whole = [Reader(number, NEVER) for number in range(count)]
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for reader in whole:
                group.create_task(reader.read(url))
        took = time.monotonic() - began
        cut = asyncio.create_task(read_all(url, count, kills))
        for number in range(kills):
            await asyncio.sleep(took / (kills + 1) / 2)
            if processes > 1:
                os.kill(random.Random(number).choice(server.api_pids()), signal.SIGKILL)
            await asyncio.sleep(took / (kills + 1) / 2)
            kill_all(server)
            server = await asyncio.to_thread(Server, tmp_path / f"{number}.log", *flags)
            url[0] = server.url
        readers = await cut
    finally:
        kill_all(server)
    assert sum(reader.resumed for reader in readers) > count
    for reader, uncut in zip(readers, whole, strict=True):
        assert len({event.partition(b"\n")[0] for event in reader.events}) == len(reader.events), "each event once"
        for choice, uncut_chunks in content(uncut).items():
            for at, (actual, expected) in enumerate(zip(content(reader)[choice], uncut_chunks, strict=True)):
                assert actual == expected, f"{call(reader.number)}: event {at} of {len(uncut_chunks)}, choice {choice}"


class _Never(random.Random):
    def choice(self, given: Any) -> Any:
        return given[-1]


NEVER = _Never()
