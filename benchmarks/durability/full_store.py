"""Latency of others while the store is full: `python -m benchmarks.durability.full_store [--gib 1]`.

Fills a folder with one key's objects, in the format before retention. That key then puts, extends and deletes objects
while another key's calls are journaled. Shows for each kind of write: transactions, longest lock, commit time in it,
most processor time (on a busy machine the rest is waiting), and the other key's longest call. `--serve` sends the
largest write to a server and shows time to first token of another caller's streams.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.options import options
from benchmarks.common.servers import served
from quire.server.durability.data_dir import DataDir, open_data_dir
from quire.server.durability.journal import JournaledCall, PinnedReplayFields
from quire.server.store.database import DATABASE_FILE, ROW_OVERHEAD_BYTES, Database
from quire.server.store.response_store import ObjectToStore, ObjectWithoutItems, StoredItem
from tests.server.store.version_2 import TABLES

OWNER = ""
LARGE = 3_900_000
"""Bytes of the largest write."""
JSON_BYTES = {"conversations": 100, "responses": 4000, "large responses": 400_000}
"""Bytes per object, by kind."""


def fill(folder: Path, size: int, kind: str, journal: int) -> int:
    """Returns the number of objects."""
    (folder / DATABASE_FILE).touch()
    each = JSON_BYTES[kind]
    is_response = "responses" in kind
    about = {"status": "completed", "background": False, "previous": None, "events": 0, "streamed": False}
    shown = json.dumps(about) if is_response else "{}"
    num_items = 2 if is_response else 0
    row_size = ROW_OVERHEAD_BYTES + each + num_items * (ROW_OVERHEAD_BYTES + each // 10)
    count, data, item = size // row_size, b"x" * each, b"x" * (each // 10)
    with closing(sqlite3.connect(folder / DATABASE_FILE, isolation_level=None)) as database:
        database.executescript("pragma journal_mode = wal; pragma synchronous = off;" + TABLES + "begin;")
        name = "response" if is_response else "conversation"
        begin = time.time() - count
        objects = (
            (OWNER, f"{name[:4]}_{n:032x}", name, begin + n, 0, row_size, num_items, shown, data) for n in range(count)
        )
        database.executemany("insert into objects values (?, ?, ?, ?, ?, ?, ?, ?, ?)", objects)
        items = (
            (OWNER, f"{name[:4]}_{n:032x}", place, f"msg_{place:032x}", item)
            for n in range(count)
            for place in range(num_items)
        )
        database.executemany("insert into items values (?, ?, ?, ?, ?)", items)
        pins = b'{"id":"x","name":"","created":0,"seed":1}'
        body = b"x" * 1000
        calls = (
            (
                OWNER,
                f"call_{n:032x}",
                "/v1/completions",
                body,
                pins,
                None,
                time.time() + 9999 + n,
                ROW_OVERHEAD_BYTES + 1000,
                b"\x80",
            )
            for n in range(journal // (ROW_OVERHEAD_BYTES + 1000))
        )
        database.executemany("insert into calls values (?, ?, ?, ?, ?, ?, ?, ?, ?)", calls)
        database.execute("commit")
        return count


class Timed(sqlite3.Connection):
    commit_seconds = 0.0
    """Seconds of the last commit."""

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        began = time.perf_counter()
        cursor = super().execute(statement, *values)
        if statement == "commit":
            Timed.commit_seconds = time.perf_counter() - began
        return cursor


class Held:
    """Lock times of transactions, by operation."""

    def __init__(self) -> None:
        self.of = threading.local()
        self.times: dict[str, list[tuple[float, float, float]]] = {}
        """Seconds of the transaction, of its commit, of processor time."""

    def install(self) -> None:
        writing = Database.write_transaction

        @contextmanager
        def timed(database: Database, *sizes: Any) -> Iterator[sqlite3.Connection]:
            Timed.commit_seconds = 0.0
            with writing(database, *sizes) as connection:
                began, processor = time.perf_counter(), time.thread_time()
                yield connection
            held = (time.perf_counter() - began, Timed.commit_seconds, time.thread_time() - processor)
            self.times.setdefault(getattr(self.of, "name", "others"), []).append(held)

        Database.write_transaction = timed  # type: ignore[method-assign]


def measure(data: DataDir, held: Held, rounds: int) -> None:
    done = threading.Event()
    waits: dict[str, list[float]] = {}
    doing = ["nothing"]

    def bystander() -> None:
        held.of.name = "another key's call"
        number = 0
        while not done.is_set():
            number += 1
            pins = PinnedReplayFields(id=f"by{number}", name="", created=0, seed=1)
            what, began = doing[0], time.perf_counter()
            data.calls.put(
                "bystander", JournaledCall(path="/v1/completions", body=b"{}", pins=pins), time.time() + 60, "0"
            )
            waits.setdefault(what, []).append(time.perf_counter() - began)
            time.sleep(0.005)

    def sweep() -> None:
        held.of.name = "sweeps"
        step = getattr(data.processes, "delete_due_data", lambda: False)
        while not done.is_set():
            time.sleep(0.02 if step() else 0.5)

    threads = [threading.Thread(target=bystander), threading.Thread(target=sweep)]
    for thread in threads:
        thread.start()
    time.sleep(3)
    for name, write in writes(data).items():
        held.of.name = doing[0] = name
        for number in range(rounds):
            write(number)
    doing[0] = "nothing"
    time.sleep(1)
    done.set()
    for thread in threads:
        thread.join()
    print(
        "| write | transactions | longest | its commit | longest but for commits | most processor time | median", end=""
    )
    print(" | another key's call |")
    print("|---|---|---|---|---|---|---|---|")
    for name, times in held.times.items():
        longest = max(times)
        apart = max(each - commit for each, commit, _ in times)
        processor = max(each for _, _, each in times)
        middle = statistics.median(each for each, _, _ in times)
        waited = max(waits.get(name, [0.0]))
        figures = (longest[0], longest[1], apart, processor, middle, waited)
        print(f"| {name} | {len(times)} | " + " | ".join(f"{1000 * each:.1f} ms" for each in figures) + " |")
    print("another key's call while nothing is put: longest", f"{1000 * max(waits['nothing']):.1f} ms")


def writes(data: DataDir) -> dict[str, Callable[[int], object]]:
    def put(name: str, count: int, size: int) -> Callable[[int], object]:
        content = b"x" * size

        def write(number: int) -> None:
            items = [StoredItem(f"msg_{n:032x}", content) for n in range(count)]
            data.store.put(
                OWNER, ObjectToStore(f"{name}{number}", ObjectWithoutItems("conversation", {}, b"{}"), items)
            )

        return write

    def append(number: int) -> None:
        items = [StoredItem(f"more_{n:032x}", b"x" * 390) for n in range(1000)]
        data.store.append_items(OWNER, f"many{number}", items)

    return {
        "conversation, empty": put("empty", 0, 0),
        "conversation, 1 item of 3.9 MB": put("one", 1, LARGE),
        "conversation, 10 items of 390 KB": put("ten", 10, LARGE // 10),
        "conversation, 10,000 items of 390 bytes": put("many", 10_000, LARGE // 10_000),
        "1,000 items added": append,
        "conversation with 11,000 items deleted": lambda number: data.store.delete(OWNER, f"many{number}"),
    }


async def attack(url: str, body: bytes, path: str, callers: int, seconds: float) -> None:
    """Measures streams' first tokens before, while and after `callers` send a body."""
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        delays: list[tuple[float, float]] = []
        done = asyncio.Event()

        async def watch() -> None:
            asked = {"prompt": "Once", "max_tokens": 2, "stream": True}
            while not done.is_set():
                began = time.monotonic()
                async with client.stream("POST", "/v1/completions", json=asked) as response:
                    async for _ in response.aiter_raw():
                        delays.append((began, time.monotonic() - began))
                        break
                await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        await asyncio.sleep(5)
        attacked = time.monotonic()

        async def send() -> int:
            with suppress(httpx.HTTPError):
                headers = {"content-type": "application/json"}
                return (await client.post(path, content=body, headers=headers)).status_code
            return 0

        statuses = await asyncio.gather(*(send() for _ in range(callers)))
        took = time.monotonic() - attacked
        await asyncio.sleep(seconds)
        done.set()
        await watching
        calm = [delay for began, delay in delays if began + delay < attacked]
        during = [delay for began, delay in delays if began + delay >= attacked]
        print(f"answers {sorted(set(statuses))} after {took:.1f} s; first tokens: before median ", end="")
        print(f"{1000 * statistics.median(calm):.0f} ms, longest {1000 * max(calm):.0f} ms; ", end="")
        print(f"from then on median {1000 * statistics.median(during):.0f}, longest {1000 * max(during):.0f} ms")


def main() -> None:
    args = options(
        __doc__,
        {
            "--gib": {"default": 1.0, "type": float, "help": "size of the full store"},
            "--journal-gib": {"default": 0.0, "type": float, "help": "size of the journal"},
            "--objects": {"default": "conversations", "choices": list(JSON_BYTES), "help": "what the store is full of"},
            "--rounds": {"default": 5, "type": int, "help": "writes of each kind"},
            "--serve": {"action": "store_true", "help": "measure a server's first tokens"},
            "--callers": {"default": 1, "type": int, "help": "with --serve: callers that send the write at once"},
            "--items": {"default": 1, "type": int, "help": "with --serve: items of the write"},
            "--streams": {"default": 0, "type": int, "help": "with --serve: the attack is this many streams"},
        },
    )
    processor = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    print(processor.partition(": ")[2], "load", Path("/proc/loadavg").read_text().split()[0])
    with tempfile.TemporaryDirectory() as name:
        folder, size = Path(name), int(args.gib * 2**30)
        count = fill(folder, size, args.objects, int(args.journal_gib * 2**30))
        print(f"{count} {args.objects}, {(folder / DATABASE_FILE).stat().st_size / 2**20:.0f} MiB on the disk")
        if args.serve:
            _serve(folder, args)
            return
        held = Held()
        held.install()
        began = time.perf_counter()
        data = open_data_dir(folder, size, connect=partial(sqlite3.connect, factory=Timed))
        print(f"opened in {time.perf_counter() - began:.1f} s")
        measure(data, held, args.rounds)
        data.close()


def _serve(folder: Path, args: Any) -> None:
    item = {"type": "message", "role": "user", "content": "x" * (LARGE // args.items)}
    body, path, callers = json.dumps({"items": [item] * args.items}).encode(), "/v1/conversations", args.callers
    bound = args.gib
    if args.streams:
        asked = {"prompt": "Once " * 300, "max_tokens": 2, "stream": True}
        body, path, callers, bound = json.dumps(asked).encode(), "/v1/completions", args.streams, args.journal_gib
    with served("--data-dir", str(folder), "--max-stored-size", str(bound)) as server:
        asyncio.run(attack(server.url, body, path, callers, 15))


if __name__ == "__main__":
    main()
