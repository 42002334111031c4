"""kill -9 of every kind of process in every layout: no answer is lost, changed or computed twice, and nothing is left.

TEST_KILLS_SEED chooses other moments and other processes of a kind.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server
from tests.e2e.streams import CHAT, COMPLETIONS
from tests.e2e.test_api_processes import listens, wait_until
from tests.e2e.test_batches import SMALL, begin, results
from tests.e2e.test_ranks import marked
from tests.e2e.test_streams import NEVER, Reader, content
from tests.server.cli.processes import needs_proc, parent

pytestmark = [pytest.mark.slow, needs_proc]

LAYOUTS = {
    "tensor": "--tensor-parallel-size 2",
    "pipeline": "--pipeline-parallel-size 2",
    "data": "--data-parallel-size 2",
    "api": "--api-server-count 2",
    "data-api": "--data-parallel-size 2 --api-server-count 2",
    "tensor-api": "--tensor-parallel-size 2 --api-server-count 2",
}
PROGRAMS = {
    b"serve": "server",
    b"quire.server.cli.api_process": "API process",
    b"quire.engine.main": "engine",
    b"quire.engine.worker.ranks.follower": "rank",
    b"quire.server.workers.worker": "fork server",
}
"""By an argument of the command line. A body worker has its fork server's."""
SUPERVISED = ("API process", "engine", "rank")
HOLDS_CONNECTIONS = ("server", "API process")
RESPONSES = "/v1/responses"
LONG_BODY = " " * 5000
"""A body of more than 4 KB is read in a body worker."""
SEED = int(os.environ.get("TEST_KILLS_SEED", "0"))
READERS, LINES = (0, 2, 3, 6), 3
RETRIED = (409, 503)


def calls() -> dict[str, tuple[str, dict[str, Any]]]:
    chat = {"messages": [{"role": "user", "content": "Tell me of a fox."}], "max_tokens": 100, "ignore_eos": True}
    sampled = chat | {"messages": [{"role": "user", "content": "Who lives here?"}], "temperature": 1, "seed": 4}
    text = {"prompt": "Once upon a time", "max_tokens": 110, "temperature": 1, "seed": 5, "ignore_eos": True}
    response = {"input": "A fox and a crow", "max_output_tokens": 140, "temperature": 0, "background": True}
    return {
        "plain stream": (CHAT, chat | {"temperature": 0, "stream": True}),
        "plain long stream": (CHAT, sampled | {"max_tokens": 200, "stream": True}),
        "plain whole": (COMPLETIONS, text),
        "keyed stream": (CHAT, sampled | {"max_tokens": 120, "stream": True}),
        "keyed whole": (COMPLETIONS, text | {"temperature": 0, "max_tokens": 150}),
        "keyed background": (RESPONSES, response),
    }


class Served:
    """A server with a data directory, started again on the same port if it is killed."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._folder, self._mark, self._starts = folder, uuid.uuid4().hex, 0
        self.temporary, self.data = folder / "tmp", folder / "data"
        self.temporary.mkdir()
        self._flags = (*SMALL, "--data-dir", str(self.data), *flags)
        self.shared_memory: set[Path] = set()
        self.server = self._start(None)

    def _start(self, port: int | None) -> Server:
        self._starts += 1
        env = {"TEST_MARK": self._mark, "TMPDIR": str(self.temporary)}
        return Server(self._folder / f"log{self._starts}", *self._flags, env=env, port=port)

    def start_again(self) -> None:
        self.server.process.wait()
        self.server = self._start(self.server.port)

    def processes(self) -> dict[str, list[int]]:
        """Process ids by kind. Raises ValueError for one of our programs that is not in PROGRAMS."""
        kinds: dict[int, str] = {}
        for pid, command in marked(self._mark).items():
            if b"quire" in command:  # not in a zombie's, nor in those of programs that libraries run
                (kinds[pid],) = [kind for program, kind in PROGRAMS.items() if program in command.split(b"\0")]
        by_kind: dict[str, list[int]] = {}
        for pid, kind in kinds.items():
            if kind == "fork server" and kinds.get(parent(pid) or 0, kind) not in HOLDS_CONNECTIONS:
                kind = "body worker"
            by_kind.setdefault(kind, []).append(pid)
        return by_kind

    def none_left(self) -> bool:
        return not marked(self._mark)

    def note_shared_memory(self) -> None:
        for pid in marked(self._mark):
            try:
                maps = Path(f"/proc/{pid}/maps").read_text()
            except OSError:
                continue
            self.shared_memory |= {Path(name) for name in re.findall(r"(/dev/shm/.*)(?<! \(deleted\))$", maps, re.M)}

    def logs(self) -> str:
        return "\n".join(log.read_text() for log in sorted(self._folder.glob("log*")))

    def kill_all(self) -> None:
        for pid in marked(self._mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.server.process.wait()


@dataclass
class Caller:
    """Sends one request and, if it has a key, sends it again until it is answered."""

    path: str
    body: dict[str, Any]
    key: str | None
    events: list[str] = field(default_factory=list)
    """Of a stream; otherwise the answer's body."""
    broken: int = 0
    ended: bool = False

    async def call(self, http: httpx.AsyncClient) -> None:
        while not self.ended:
            try:
                await self._call_once(http)
            except httpx.TransportError:
                self.broken += 1
                if self.key is None:
                    return
            await asyncio.sleep(0 if self.ended else 0.2)

    async def _call_once(self, http: httpx.AsyncClient) -> None:
        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            headers["Idempotency-Key"] = self.key
        raw = json.dumps(self.body) + ("" if self.body.get("stream") else LONG_BODY)
        async with http.stream("POST", self.path, content=raw, headers=headers) as response:
            if self.broken and response.status_code in RETRIED:
                return
            assert response.status_code == 200, (await response.aread()).decode()
            num_events = 0
            async for event in _events(response):
                assert num_events == len(self.events) or event == self.events[num_events], "the same bytes again"
                self.events[num_events : num_events + 1] = [event]
                num_events += 1
            assert num_events == len(self.events)
        if self.path == RESPONSES:
            self.events = [await self._poll(http, json.loads(self.events[0])["id"])]
        self.ended = True

    async def _poll(self, http: httpx.AsyncClient, id: str) -> str:
        while True:
            try:
                response = await http.get(f"{RESPONSES}/{id}")
            except httpx.TransportError:
                self.broken += 1
            else:
                assert response.status_code in (200, 503), response.text
                if response.status_code == 200 and response.json()["status"] not in ("queued", "in_progress"):
                    return response.text
            await asyncio.sleep(0.2)

    def _chunks(self) -> list[dict[str, Any]]:
        data = [event.rpartition("data: ")[2] for event in self.events]
        chunks = [json.loads(each) for each in data if each != "[DONE]"]
        assert not any(chunk.get("error") for chunk in chunks), chunks
        return chunks

    @property
    def text(self) -> str:
        if self.path == RESPONSES:
            return "".join(chunk["output"][0]["content"][0]["text"] for chunk in self._chunks())
        choices = [choice for chunk in self._chunks() for choice in chunk["choices"]]
        return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)

    @property
    def finish_reason(self) -> str | None:
        """What tells a client that the answer is whole."""
        chunks = self._chunks()
        if self.path == RESPONSES:
            return str(chunks[-1]["status"]) if chunks and self.ended else None
        ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
        assert len(ends) <= 1, "a second end"
        return "[DONE]" if not ends and any("[DONE]" in event for event in self.events) else next(iter(ends), None)


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """Whole events of a stream, or the whole body."""
    if "event-stream" not in response.headers["Content-Type"]:
        yield (await response.aread()).decode()
        return
    left = ""
    async for piece in response.aiter_text():
        *events, left = (left + piece).split("\n\n")
        for event in events:
            if not event.startswith(":"):
                yield event


class Mix:
    """Requests of every kind at once."""

    def __init__(self, served: Served, name: str) -> None:
        self._served = served
        limits = httpx.Limits(max_keepalive_connections=0)  # so that all API processes get some
        self.http = httpx.AsyncClient(base_url=served.server.url, timeout=280, limits=limits)
        self.callers = {
            call: Caller(path, body, f"{name} {call}" if "keyed" in call else None)
            for call, (path, body) in calls().items()
        }
        self.readers = [Reader(number, NEVER) for number in READERS]
        self._batch = begin(served.server.url, LINES)
        self.tasks: list[asyncio.Task[None]] = []

    @property
    def num_events(self) -> int:
        return sum(len(each.events) for each in self.callers.values()) + sum(len(each.events) for each in self.readers)

    def begin(self) -> None:
        url = [self._served.server.url]
        self.tasks = [asyncio.create_task(caller.call(self.http)) for caller in self.callers.values()]
        self.tasks += [asyncio.create_task(reader.read(url)) for reader in self.readers]

    async def end(self) -> None:
        async with asyncio.timeout(300):
            await asyncio.gather(*self.tasks)
        self.batch = await asyncio.to_thread(results, self._served.server.url, self._batch)

    async def repeat_keyed(self) -> None:
        """Ask again for what was answered: it must come from the journal, not from the engine."""
        generated = self._served.server.metric("vllm:generation_tokens_total")
        for caller in self.callers.values():
            if caller.key is not None:
                again = Caller(caller.path, caller.body, caller.key, broken=1)
                await again.call(self.http)
                assert again.events == caller.events
        assert self._served.server.metric("vllm:generation_tokens_total") == generated, "computed twice"

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.http.aclose()

    def assert_equals(self, expected: Mix, *, may_break: bool) -> None:
        for call, caller in self.callers.items():
            whole = expected.callers[call]
            if not may_break:
                assert not caller.broken, call
            assert caller.ended or (may_break and caller.key is None), call
            if caller.finish_reason is not None or caller.ended:
                assert (caller.text, caller.finish_reason) == (whole.text, whole.finish_reason), call
            else:
                assert whole.text.startswith(caller.text), call
        for reader, uncut in zip(self.readers, expected.readers, strict=True):
            assert len({event.partition(b"\n")[0] for event in reader.events}) == len(reader.events), "each id once"
            assert content(reader) == content(uncut), reader.number
            assert may_break or not reader.resumed, reader.number
        assert self.batch == expected.batch


async def kill_one(served: Served, mix: Mix, expected: Mix, kind: str, moment: str, rng: random.Random) -> str:
    """Kill a process of this kind while the mix runs. Before the first token the engines are stopped, so that none can
    come; a body worker is stopped, so that it dies with a request's body.
    """
    processes = served.processes()
    if kind not in processes:  # a fork server is started when no body worker is idle
        for pid in processes.get("body worker", ()):
            os.kill(pid, signal.SIGKILL)
        await Caller(*calls()["plain whole"], key=None).call(mix.http)
        processes = served.processes()
    kinds = {"engine", kind} & {"engine", "body worker"} if moment == "before" else ()
    stopped = [pid for each in kinds for pid in processes[each]]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    mix.begin()
    if moment == "before":
        await asyncio.sleep(rng.uniform(0.0, 1.0))
    else:
        events = rng.randrange(5, expected.num_events // 2)
        await wait_until(lambda: mix.num_events >= events)
        processes = served.processes()
    num_open = sum(not task.done() for task in mix.tasks)
    assert num_open, "too late"
    os.kill(rng.choice(processes[kind]), signal.SIGKILL)
    for pid in stopped:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    if kind == "server":
        await wait_until(served.none_left, served.processes)
        await asyncio.to_thread(served.start_again)
    return f"{num_open} open of {len(mix.tasks)}, after {mix.num_events} events"


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_killed_process_loses_doubles_and_leaves_nothing(layout: str, tmp_path: Path) -> None:
    rng = random.Random(f"{layout} {SEED}")
    served = Served(tmp_path, *LAYOUTS[layout].split())
    mixes: list[Mix] = []

    async def run(name: str) -> Mix:
        mixes.append(mix := await asyncio.to_thread(Mix, served, name))
        return mix

    try:
        expected = await run("undisturbed")
        expected.begin()
        await expected.end()
        expected.assert_equals(expected, may_break=False)
        before = served.processes()
        counts = {kind: len(before[kind]) for kind in SUPERVISED if kind in before}
        for kind in ("body worker", "fork server", *counts, "server"):
            for moment in ("before", "amid"):
                mix = await run(f"{kind} {moment}")
                what = await kill_one(served, mix, expected, kind, moment, rng)
                await mix.end()
                broken = sum(caller.broken > 0 for caller in mix.callers.values())
                resumed = sum(reader.resumed > 0 for reader in mix.readers)
                unanswered = [call for call, caller in mix.callers.items() if not caller.ended]
                print(f"{layout}: {kind} {moment}: {what}; {broken} broken, {resumed} resumed, left: {unanswered}")
                mix.assert_equals(expected, may_break=kind in HOLDS_CONNECTIONS)
                await mix.repeat_keyed()
                await wait_until(lambda: {each: len(served.processes().get(each, [])) for each in counts} == counts)
                await wait_until(served.server.healthy)
                await wait_until(lambda: all(map(listens, served.server.api_pids())))
                for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
                    await wait_until(lambda: served.server.metric(gauge) == 0, lambda: gauge)  # noqa: B023
                assert served.server.metric("quire:quarantined_requests_total") == 0
                served.note_shared_memory()
        assert served.server.stop() == 0
        await wait_until(served.none_left, served.processes)
        assert [*served.temporary.iterdir()] == []
        assert {path.name for path in served.data.iterdir()} == {"lock", "responses.sqlite3", "files"}
        assert not [path for path in served.shared_memory if path.exists()]
        assert "Traceback" not in served.logs()
    except BaseException:
        print(served.logs())
        raise
    finally:
        for mix in mixes:
            await mix.close()
        served.kill_all()
