"""Names that a server with a fake engine writes to its data folder and receipt log, and shows to operators."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tests.server.api import NAME, Api, open_api
from tests.server.fake import FakeEngine, hashed
from tests.users_names import lines_of_value, names_in

Names = dict[str, list[str]]
"""Names by section."""
_SECONDS = 60
_NUMBER = re.compile(r"[0-9a-f]{16,}|\d+")
_ASKED = {"model": NAME, "prompt": "Hi", "max_tokens": 3}
_LINE = {"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": _ASKED}


@dataclass(frozen=True)
class Written:
    names: Names
    keys: Names
    """Outer keys of stored structs, as they are on disk."""


async def written(folder: Path, watched: Callable[[Api], AsyncGenerator[bytes]]) -> Written:
    """`watched` returns the events of the engine page."""
    data, receipts = folder / "data", folder / "receipts.jsonl"
    engine = FakeEngine(hashed(b"abcdefghijklmnop"), max_model_len=2**16, step_seconds=0.002)
    async with asyncio.timeout(_SECONDS), open_api(engine, data_dir=data, receipt_log=receipts) as api:
        names = await _stored(api) | await _told(api, watched(api))
        files = [*data.rglob("*")]
    files = [path.relative_to(data) for path in (*files, *data.rglob("*")) if path.name != "files"]
    names["--data-dir: files"] = sorted({_masked(str(path)).replace("sqlite*", "sqlite3") for path in files})
    keys = {"receipts": _keys(map(json.loads, receipts.read_bytes().splitlines()))}
    with closing(sqlite3.connect(data / "responses.sqlite3")) as database:
        names |= _tables(database)
        for section, column, decode in _STRUCTS:
            rows = database.execute(f"select {column[1]} from {column[0]}").fetchall()
            keys[section] = _keys(decode(row[0]) for row in rows)
    return Written(names, keys)


_STRUCTS: tuple[tuple[str, tuple[str, str], Callable[[bytes], Any]], ...] = (
    ("journal: calls.pins", ("calls", "pins"), json.loads),
    ("journal: calls.progress", ("calls", "progress"), msgspec.msgpack.decode),
    ("batches.data", ("batches", "data"), json.loads),
)


def _keys(objects: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for each in objects for name in each))


def _masked(text: str) -> str:
    return _NUMBER.sub("*", text)


async def _stored(api: Api) -> Names:
    """Store each kind of object; return the forms of ids, which callers keep, and of batch results."""
    first = await api.post("/v1/responses", {"input": "Hi", "max_output_tokens": 3, "metadata": {"a": "b"}})
    await api.post("/v1/responses", {"input": "On", "max_output_tokens": 3, "previous_response_id": first["id"]})
    item = {"type": "message", "role": "user", "content": "Hi"}
    conversation = await api.post("/v1/conversations", {"items": [item]})
    lines = [_LINE, {**_LINE, "custom_id": "two", "body": _ASKED | {"model": "none"}}]
    upload = {"file": ("a.jsonl", "\n".join(map(json.dumps, lines)))}
    file = (await api.http.post("/v1/files", files=upload, data={"purpose": "batch"})).json()
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = await api.post("/v1/batches", wanted)
    while batch["status"] != "completed":
        await asyncio.sleep(0.01)
        batch = (await api.http.get(f"/v1/batches/{batch['id']}")).json()
    answers = [await api.http.get(f"/v1/files/{batch[name]}/content") for name in ("output_file_id", "error_file_id")]
    results = [json.loads(line) for each in answers for line in each.text.splitlines()]
    for each in results:
        each["response"]["body"] = None  # covered by the APIs' own schemas
    stream = await api.http.post(
        "/v1/completions", json={**_ASKED, "stream": True}, headers={"Idempotency-Key": "mine"}
    )
    (event, *_) = re.findall(r"^id: (.*)$", stream.text, re.MULTILINE)
    ids = {"response": first["id"], "item": first["output"][0]["id"], "conversation": conversation["id"]}
    ids |= {"file": file["id"], "batch": batch["id"], "event": event, "completion": event.partition(":")[0]}
    chat = await api.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3})
    message = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "model": NAME}
    ids |= {"chat": chat["id"], "message": (await api.post("/v1/messages", message))["id"]}
    return {
        "ids": [f"{kind}: {_masked(id)}" for kind, id in ids.items()],
        "batches: a result": lines_of_value(results),
        "batches: GET /v1/batches/ID": lines_of_value(batch),
    }


async def _told(api: Api, events: AsyncGenerator[bytes]) -> Names:
    """Names that operators see while two choices are computed. The phases depend on the moment."""
    await asyncio.sleep(1.1)  # statistics have a resolution of whole seconds
    answer = asyncio.create_task(api.post("/v1/completions", {"prompt": "Hello", "max_tokens": 50_000, "n": 2}))
    await api.engine.sent.wait()
    async with aclosing(events):
        hello, state = _event(await anext(events)), _event(await anext(events))
        while not state["data"]["engine"]["requests"]:
            state = _event(await anext(events))
    state["data"]["history"] = []
    trace = (await api.http.get("/v1/engine/trace", params={"seconds": 0.05})).json()
    name = state["data"]["engine"]["requests"][0]["id"].rpartition("-")[0]
    await api.http.delete(f"/v1/requests/{name}")
    await answer
    explained = await api.http.get(f"/v1/requests/{name}/explain")
    recent = await api.http.get("/v1/engine/requests")
    told: dict[str, tuple[Any, set[str]]] = {
        "GET /v1/engine/events: hello": (hello, {"data.info.adaptable"}),
        "GET /v1/engine/events: state": (state, set()),
        "GET /v1/engine/trace": (trace, {"otherData.phases_seconds"}),
        "GET /v1/engine/requests": (recent.json(), {"data[].phases_ms"}),
        "GET /v1/requests/ID/explain": (explained.json(), {"phases_ms", "sequences[].phases_ms"}),
    }
    return {
        section: list(dict.fromkeys(name.removesuffix("[]") for name in names_in(lines_of_value(value, free))))
        for section, (value, free) in told.items()
    }


def _event(event: bytes) -> dict[str, Any]:
    name, data = event.decode().removesuffix("\n\n").split("\n")
    return {name.replace(": ", " "): "", "data": json.loads(data.removeprefix("data: "))}


def _tables(database: sqlite3.Connection) -> Names:
    def column(query: str) -> list[Any]:
        return [row[0] for row in database.execute(query)]

    found = [f"user_version {column('pragma user_version')[0]}"]
    for (table,) in database.execute("select name from sqlite_master where type = 'table' order by name").fetchall():
        for place, name, kind, is_needed, default, key in database.execute(f"pragma table_info({table})"):
            more = f"{' not null' * is_needed}{'' if default is None else f' default {default}'}{' key' * bool(key)}"
            found.append(f"{table}[{place}] {name} {kind.lower()}{more}")
    indexes = column("select sql from sqlite_master where type = 'index' and sql is not null")
    found += [" ".join(sql.split()) for sql in indexes]
    kinds = database.execute("select kind, about from objects").fetchall()
    return {
        "responses.sqlite3": found,
        "responses.sqlite3: objects.kind, and keys of objects.about": sorted(
            {f"{kind}: {name}" for kind, about in kinds for name in ("", *json.loads(about))}
        ),
        "responses.sqlite3: calls.path, files.purpose": sorted(
            {*column("select path from calls"), *column("select purpose from files")}
        ),
    }
