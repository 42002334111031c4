"""Simulated clients: each knows its answer in advance and retries until it has it."""

from __future__ import annotations

import asyncio
import json
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from quire.engine.common.request_params import SamplingParams
from tests.server.api import NAME
from tests.simulation.engine import is_answer
from tests.simulation.server import Connection, Cut

LATER = (409, 425, 429, 503)


class World(Protocol):
    rng: random.Random
    seeds: Mapping[str, int]
    """Of all requests to engines, by their id."""

    @property
    def excused(self) -> float:
        """The last moment at which the disk was full or the machine without power: what was accepted before may be
        unknown."""

    version: int
    """Of what computes: later ones answer otherwise."""
    upgraded: float
    """The last moment at which another version was started: it tells no answers of the earlier one but those that it
    can go on with."""

    def tell(self, what: str) -> None:
        """Write down what happens, for who wants to know why a seed failed."""

    async def connect(
        self, method: str, url: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Connection: ...


class Client(ABC):
    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.rng = world.rng
        self.number = number
        self.seed = 1000 * number + self.rng.randrange(1000)
        self.since = 0.0
        """When its request was made for the first time, or once more because it may have been lost."""

    @abstractmethod
    async def run(self) -> None:
        """Until it has its answer. Raises AssertionError for a wrong one."""

    async def ask(
        self, method: str, url: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """The status and the answer, at last: what ended without one is asked for again, as it is asked for when there
        is no room."""
        content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        while True:
            with suppress(Cut):
                connection = await self.world.connect(method, url, content, headers)
                if headers and "Idempotency-Key" in headers and self.rng.random() < 0.2:
                    await self.world.connect(method, url, content, headers)  # it comes twice; this one is not read
                if self.rng.random() < 0.2:
                    asyncio.get_running_loop().call_later(self.rng.random(), connection.break_off)
                status, _, answer = await connection.whole()
                if status not in LATER:
                    return status, answer
            await asyncio.sleep(self.rng.choice((0.01, 0.1, 1.0)))

    def check(self, text: str, seed: int, count: int) -> None:
        right = len(text) == count and is_answer(text.encode(), seed, self.world.version)
        assert right, f"client {self.number}: a token was lost, repeated or changed"

    def lost(self) -> None:
        """Something that was accepted is not there: that is allowed only after what takes it."""
        assert self.world.excused >= self.since, f"client {self.number}: what was accepted is not known any more"
        self.since = asyncio.get_running_loop().time()


class Streaming(Client):
    """Reads a stream that is cut at random, and resumes it."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, number)
        self.kind = self.rng.choice(("chat", "two", "completion", "response", "message"))
        self.count = self.rng.choice((3, 12, 40, 130))
        self.key = self.rng.choice((None, f"key {number}"))
        self.seeded = self.rng.random() < 0.5
        self.path, self.body = self._request()
        self.events: dict[str, bytes] = {}
        self.stream = ""

    def _request(self) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {"model": NAME, "stream": True, **({"seed": self.seed} if self.seeded else {})}
        messages = [{"role": "user", "content": f"text {self.number}"}]
        match self.kind:
            case "completion":
                return "/v1/completions", body | {"prompt": "once", "max_tokens": self.count}
            case "response":
                stored = self.rng.random() < 0.5
                return "/v1/responses", body | {"input": "Hi", "max_output_tokens": self.count, "store": stored}
            case "message":
                return "/v1/messages", body | {"messages": messages, "max_tokens": self.count}
        choices = 2 if self.kind == "two" else 1
        return "/v1/chat/completions", body | {"messages": messages, "max_tokens": self.count, "n": choices}

    async def run(self) -> None:
        while not self._whole():
            with suppress(Cut):
                await self._read()
            await asyncio.sleep(self.rng.choice((0.0, 0.01, 0.5, 3.0)))
        self._check()
        first, self.events = self.events, {}
        while not self._whole():  # of a request that comes twice the first copy ends early
            self.events = {}
            status, answer = await self.ask("GET", f"/v1/streams/{self.stream}")  # all of it once more
            if self.world.excused >= self.since:
                return
            assert status == 200, f"{self.kind}: {status}"
            self._take(answer)
        if self.world.upgraded >= self.since:  # other versions have another fingerprint
            assert _joined(self.events.values()) == _joined(first.values())
        elif self.kind != "two":  # whose choices come in any order, which the ids tell
            same = {id: _timeless(event) for id, event in self.events.items()}
            assert same == {id: _timeless(event) for id, event in first.items()}, "it is not the same to the byte"

    async def _read(self) -> None:
        """What comes until the connection ends."""
        last = next(reversed(self.events), None)
        method, url, headers = "POST", self.path, {}
        if last is not None and self.rng.random() < 0.5:
            headers = {"Last-Event-ID": last}
        elif last is not None:
            method, url, headers = "GET", f"/v1/streams/{self.stream}", {"Last-Event-ID": last}
        elif self.stream and self.rng.random() < 0.5:
            method, url = "GET", f"/v1/streams/{self.stream}"
        elif self.key is not None:
            headers = {"Idempotency-Key": self.key}
        else:
            self.stream = ""
            self.since = asyncio.get_running_loop().time()
        if self.rng.random() < 0.1 and (headers or method == "GET"):
            await self.world.connect(method, url, json.dumps(self.body).encode(), headers)  # nobody reads this one
        if self.rng.random() < 0.3:
            headers["X-Keep-Alive-Seconds"] = "2"
        connection = await self.world.connect(method, url, json.dumps(self.body).encode(), headers)
        if self.rng.random() < 0.5:
            asyncio.get_running_loop().call_later(4 * self.rng.random() ** 3, self._cut, connection)
        status, given = await connection.head()
        self.world.tell(f"client {self.number} ({self.kind}): {method} {url} {headers}: {status}")
        if status == 409 and b"not all kept" in await _rest(connection):
            self.lost()
            self.events, self.stream, self.key = {}, "", None  # it is asked for anew
        if status in LATER:
            return
        if status == 404:
            self.lost()
            self.events, self.stream = {}, ""
            return
        assert status == 200, f"{self.kind}: {method} {url} {headers}: {status}"
        self.stream = given.get("x-stream-id", self.stream)
        left = b""
        async for piece in connection.pieces():
            whole, _, left = (left + piece).rpartition(b"\n\n")
            self._take(whole)

    def _cut(self, connection: Connection) -> None:
        connection.break_off() if self.rng.random() < 0.5 else connection.leave()

    def _take(self, events: bytes) -> None:
        for event in events.split(b"\n\n"):
            if found := re.match(rb"id: (.*)\n", event):
                id = found[1].decode()
                assert id not in self.events, f"{self.kind}: {id} came twice"
                self.events[id] = event

    def _whole(self) -> bool:
        last = next(reversed(self.events), "")
        return last.rpartition(".")[2] not in ("", "0") and self._ends(self.events[last])

    def _ends(self, event: bytes) -> bool:
        ends = {"response": b'"response.incomplete"', "message": b'"message_stop"'}.get(self.kind, b"[DONE]")
        return ends in event

    def _check(self) -> None:
        texts: dict[int, str] = {}
        numbers = []
        for event in self.events.values():
            data = event.rpartition(b"data: ")[2]
            if data == b"[DONE]":
                continue
            told = json.loads(data)
            numbers.append(told.get("sequence_number"))
            for index, text in _texts(told):
                texts[index] = texts.get(index, "") + text
        params, choices = SamplingParams(seed=self.seed), range(2 if self.kind == "two" else 1)
        if min(self.world.excused, self.world.upgraded) >= self.since:  # what was lost another version computed
            return
        seeds = {at: self.world.seeds[f"{self.stream}-{at}"] for at in choices}
        assert not self.seeded or seeds == {at: params.choice_seed(at) for at in choices}
        for at in choices:
            self.check(texts[at], seeds[at], self.count)
        if self.kind == "response":
            assert numbers == list(range(len(numbers))), f"sequence_number: {numbers}"


def _texts(told: dict[str, Any]) -> list[tuple[int, str]]:
    """Of an event, by choice."""
    if choices := told.get("choices"):
        return [(each["index"], each.get("text") or each.get("delta", {}).get("content") or "") for each in choices]
    if told.get("type") == "response.output_text.delta":
        return [(0, told["delta"])]
    if told.get("type") == "content_block_delta":
        return [(0, told["delta"]["text"])]
    return []


def _joined(events: Iterable[bytes]) -> dict[int, str]:
    """What events say, by choice."""
    texts: dict[int, str] = {}
    for event in events:
        data = event.rpartition(b"data: ")[2]
        if data != b"[DONE]":
            for index, text in _texts(json.loads(data)):
                texts[index] = texts.get(index, "") + text
    return texts


async def _rest(connection: Connection) -> bytes:
    return b"".join([piece async for piece in connection.pieces()])


def _timeless(event: bytes) -> bytes:
    """Without the moment of its end, and without what was cached: where the first process ended before the first note,
    the next one finds it out anew."""
    cached = rb'"(?:cached_tokens|cache_read_input_tokens|input_tokens)":\d+'
    return re.sub(cached, b"", re.sub(rb'"completed_at":\d+', b"", event))


class Whole(Client):
    """Retries one answer with an Idempotency-Key until it arrives, then repeats it, and requests another."""

    async def run(self) -> None:
        count = self.rng.choice((3, 40))
        body = {"model": NAME, "prompt": "once", "max_tokens": count, "seed": self.seed}
        key = {"Idempotency-Key": f"whole {self.number}"}
        status, answer = await self.ask("POST", "/v1/completions", body, key)
        assert status == 200, (status, answer)
        first = json.loads(answer)
        self.check(first["choices"][0]["text"], self.seed, count)
        status, answer = await self.ask("POST", "/v1/completions", body, key)
        if self.world.excused < 0:
            assert json.loads(answer)["choices"] == first["choices"]
        status, answer = await self.ask("POST", "/v1/completions", body | {"max_tokens": 2}, key)
        assert status == 422 or self.world.excused > 0, (status, answer)


class InBackground(Client):
    """Requests a background response and returns later."""

    async def run(self) -> None:
        count = self.rng.choice((3, 40, 130))
        body = {"model": NAME, "input": "Hi", "max_output_tokens": count, "seed": self.seed, "background": True}
        key = {"Idempotency-Key": f"background {self.number}"}
        while True:
            self.since = asyncio.get_running_loop().time()
            status, answer = await self.ask("POST", "/v1/responses", body, key)
            assert status in (200, 404), (status, answer)
            if status == 200 and await self._ended(json.loads(answer)["id"], count):
                return

    async def _ended(self, id: str, count: int) -> bool:
        while True:
            status, answer = await self.ask("GET", f"/v1/responses/{id}")
            if status == 404:
                self.lost()
                return False
            told = json.loads(answer)
            if told["status"] not in ("queued", "in_progress"):
                break
            await asyncio.sleep(1)
        if told["status"] == "failed":
            self.lost()
            return True
        assert told["status"] == "incomplete", told
        self.check(told["output"][0]["content"][0]["text"], self.seed, count)
        return True


class Batching(Client):
    """Uploads a file, runs it as a batch, and reads the results."""

    async def run(self) -> None:
        self.lines = [self._line(number) for number in range(self.rng.choice((1, 5, 12)))]
        while not await self._answered():
            self.lost()

    def _line(self, number: int) -> dict[str, Any]:
        body = {"model": NAME, "prompt": f"{number}", "max_tokens": 1 + number % 4 * 7, "seed": self.seed + number}
        return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}

    async def _answered(self) -> bool:
        self.since = asyncio.get_running_loop().time()
        content = b"\n".join(json.dumps(line).encode() for line in self.lines)
        form = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\nContent-Disposition: '
        form += b'form-data; name="file"; filename="in.jsonl"\r\n\r\n' + content + b"\r\n--x--\r\n"
        headers = {"content-type": "multipart/form-data; boundary=x"}
        status, answer = await self.ask("POST", "/v1/files", form, headers)
        assert status == 200, answer
        file = json.loads(answer)["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        status, answer = await self.ask("POST", "/v1/batches", asked)
        while status == 200:
            batch = json.loads(answer)
            if batch["status"] in ("completed", "failed", "expired", "cancelled"):
                return await self._check(batch)
            await asyncio.sleep(1)
            status, answer = await self.ask("GET", f"/v1/batches/{batch['id']}")
        assert status == 404, answer
        return False

    async def _check(self, batch: dict[str, Any]) -> bool:
        assert batch["status"] == "completed", batch
        assert batch["request_counts"] == {"total": len(self.lines), "completed": len(self.lines), "failed": 0}
        status, answer = await self.ask("GET", f"/v1/files/{batch['output_file_id']}/content")
        if status == 404:
            return False
        found = [json.loads(line) for line in answer.splitlines()]
        assert sorted(each["custom_id"] for each in found) == sorted(line["custom_id"] for line in self.lines)
        for line in found:
            body = self.lines[int(line["custom_id"][1:])]["body"]
            told = line["response"]["body"]["choices"][0]["text"]
            self.check(told, body["seed"], body["max_tokens"])
        return True
