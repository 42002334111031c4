"""Stored responses and conversations: chains, retrieval, background, tenants; against the OpenAI SDK."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from quire.engine.common.errors import Overloaded
from quire.server.resolve.other_apis import history
from quire.server.routes.data_dir import conversations
from quire.server.store.database import DATABASE_FILE
from quire.server.store.response_store import ConversationLimits
from tests.server.api import NAME, Api, open_api
from tests.server.fake import FakeEngine, hashed, scripted
from tests.server.hosted import serving
from tests.server.openai_responses import RESPONSE, events_of, folded
from tests.server.resolve.test_tool_requests import HERMES, prompt
from tests.server.routes.test_responses import PATH, TOOLS, TWO

EOS = 258
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)


@asynccontextmanager
async def storing(folder: Path, text: str = "Hello", **options: Any) -> AsyncIterator[Api]:
    engine = options.pop("engine", None) or FakeEngine(scripted(text.encode(), EOS), eos=[EOS], max_model_len=4096)
    async with open_api(engine, **{"chat_template": HERMES, "data_dir": folder, **options}) as api:
        yield api


def body(input: Any = "Hi", **fields: Any) -> dict[str, Any]:
    return {"model": NAME, "input": input, **fields}


async def at_its_end(api: Api, id: str) -> Any:
    async with asyncio.timeout(30):
        while (now := await api.openai.responses.retrieve(id)).status in ("queued", "in_progress"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return now


async def test_response_chain_survives_restart(tmp_path: Path) -> None:
    async with storing(tmp_path, TWO) as api:
        first = await api.post(PATH, body("One", tools=TOOLS, instructions="Once."))
        assert first["store"] is True
        outputs = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": f"result of {item['name']}"}
            for item in first["output"]
        ]
    async with storing(tmp_path, "Done.") as api:
        second = await api.post(PATH, body(outputs, tools=TOOLS, previous_response_id=first["id"]))
        assert "result of weather" in prompt(api)
        assert "user\nOne" in prompt(api)
        assert "weather(Rome)" in prompt(api)
        assert "Once." not in prompt(api), "instructions are those of one request"
        third = await api.openai.responses.create(model=NAME, input="Two", previous_response_id=second["id"])
        assert third.previous_response_id == second["id"]
        assert prompt(api).index("One") < prompt(api).index("Done.") < prompt(api).index("Two")
        retrieved = await api.openai.responses.retrieve(third.id)
        assert retrieved == third
        RESPONSE.validate_python((await api.http.get(f"{PATH}/{third.id}")).json())
        await api.openai.responses.delete(second["id"])
        for fields in ({"previous_response_id": second["id"]}, {"previous_response_id": third.id}):
            error = (await api.post(PATH, body("Three", **fields), 400))["error"]
            assert error["param"] == "previous_response_id"
            assert second["id"] in error["message"]
        with pytest.raises(openai.NotFoundError, match="not any more"):
            await api.openai.responses.retrieve(second["id"])


async def test_input_tokens_endpoint_equals_response_usage(tmp_path: Path) -> None:
    async with storing(tmp_path, "Done.") as api:
        first = await api.post(PATH, body("One", tools=TOOLS, instructions="Once."))
        about: dict[str, Any] = {"instructions": "Be brief.", "tools": TOOLS, "previous_response_id": first["id"]}
        for fields in ({}, about):
            counted = await api.openai.responses.input_tokens.count(model=NAME, input="Two", **fields)
            answered = await api.openai.responses.create(model=NAME, input="Two", **fields)
            assert answered.usage is not None
            assert (counted.object, counted.input_tokens) == ("response.input_tokens", answered.usage.input_tokens)
        counting = f"{PATH}/input_tokens"
        response = await api.http.post(counting, json=body("Two", temperature=1.0, truncation="auto"))
        assert response.headers["x-ignored-params"] == "truncation, temperature"
        assert (await api.post(counting, body("x" * 9000)))["input_tokens"] > api.engine.max_model_len
        assert (await api.post(counting, body(previous_response_id="resp_x"), 400))["error"]["param"] == (
            "previous_response_id"
        )


async def test_streamed_response_is_stored_when_stream_ends(tmp_path: Path) -> None:
    async with storing(tmp_path) as api:
        response = await api.http.post(PATH, json=body(stream=True), headers={"X-Request-Id": "mine"})
        streamed = folded(events_of(response.text))
        assert (await api.http.get(f"{PATH}/{streamed['id']}")).json() == streamed
        assert streamed["id"] != "resp_mine", "that may name several"
        unstored = await api.post(PATH, body(store=False))
        assert unstored["store"] is False
        assert (await api.http.get(f"{PATH}/{unstored['id']}")).status_code == 404


async def test_input_items_are_listed_in_pages(tmp_path: Path) -> None:
    items = [
        {"role": "user", "content": "a"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "reasoning", "id": "x", "summary": [{"type": "summary_text", "text": "s"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "r"}]},
        {"type": "custom_tool_call", "call_id": "2", "name": "g", "input": "i"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "o"},
    ]
    async with storing(tmp_path) as api:
        answer = await api.post(PATH, body(items))
        listed = [item async for item in api.openai.responses.input_items.list(answer["id"], order="asc", limit=2)]
        assert [item.type for item in listed] == [item.get("type", "message") for item in items]
        raw = (await api.http.get(f"{PATH}/{answer['id']}/input_items")).json()
        for item in raw["data"]:
            ITEM.validate_python(item)
        assert [item["id"] for item in raw["data"]] == [item.id for item in reversed(listed)]
        wrong = await api.http.get(f"{PATH}/{answer['id']}/input_items?after=x")
        assert wrong.json()["error"]["param"] == "after"


async def test_stored_responses_are_visible_only_to_same_key(tmp_path: Path) -> None:
    async with storing(tmp_path, api_key=["a", "b"]) as api:
        mine, other = ({"Authorization": f"Bearer {key}"} for key in "ab")
        answer = (await api.http.post(PATH, json=body(), headers=mine)).json()
        conversation = (await api.http.post("/v1/conversations", json={}, headers=mine)).json()
        for path in (f"{PATH}/{answer['id']}", f"/v1/conversations/{conversation['id']}"):
            assert (await api.http.get(path, headers=other)).status_code == 404
            assert (await api.http.delete(path, headers=other)).status_code == 404
            assert (await api.http.get(path, headers=mine)).status_code == 200
        for fields in ({"previous_response_id": answer["id"]}, {"conversation": conversation["id"]}):
            assert (await api.http.post(PATH, json=body(**fields), headers=other)).status_code == 400
            assert (await api.http.post(PATH, json=body(**fields), headers=mine)).status_code == 200


async def test_nothing_is_stored_without_data_dir() -> None:
    async with open_api(FakeEngine(scripted(b"x", EOS), eos=[EOS])) as api:
        for fields in ({"previous_response_id": "resp_1"}, {"conversation": "conv_1"}, {"background": True}):
            error = (await api.post(PATH, body(**fields), 400))["error"]
            assert error["param"] in fields
            assert "--data-dir" in error["message"]
        answer = await api.http.post(PATH, json=body(store=True))
        assert answer.headers["x-ignored-params"] == "store"
        assert answer.json()["store"] is False
        assert (await api.http.get(f"{PATH}/{answer.json()['id']}")).status_code == 404
        assert (await api.http.post("/v1/conversations", json={})).status_code == 404


async def test_mutually_exclusive_response_fields_are_rejected(tmp_path: Path) -> None:
    async with storing(tmp_path) as api:
        both = await api.post(PATH, body(previous_response_id="a", conversation="b"), 400)
        assert both["error"]["param"] == "conversation"
        assert (await api.post(PATH, body(background=True, store=False), 400))["error"]["param"] == "background"


async def test_ids_with_surrogates_are_rejected(tmp_path: Path) -> None:
    async with storing(tmp_path) as api:
        for fields in (
            {"previous_response_id": "\ud800"},
            {"conversation": "\ud800"},
            {"conversation": {"id": "\ud800"}},
        ):
            answer = await api.http.post(PATH, content=json.dumps(body(**fields)))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(fields)))


async def test_conversation_lifecycle_through_openai_sdk(tmp_path: Path) -> None:
    async with storing(tmp_path, "Fine.") as api:
        client = api.openai.conversations
        talk = await client.create(metadata={"a": "b"}, items=[{"type": "message", "role": "user", "content": "Zero"}])
        assert (await client.retrieve(talk.id)).metadata == {"a": "b"}
        answer = await api.openai.responses.create(model=NAME, input="One", conversation=talk.id)
        assert answer.conversation is not None
        assert answer.conversation.id == talk.id
        events = await api.http.post(PATH, json=body("Two", conversation={"id": talk.id}, store=False, stream=True))
        folded(events_of(events.text))
        assert (
            prompt(api).index("Zero") < prompt(api).index("One") < prompt(api).index("Fine.") < prompt(api).index("Two")
        )
        items = [item async for item in client.items.list(talk.id, order="asc", limit=3)]
        assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"]
        await client.items.create(talk.id, items=[{"type": "message", "role": "user", "content": "Three"}])
        first = await client.items.retrieve(items[0].id or "", conversation_id=talk.id)
        assert first == items[0]
        await client.items.delete(items[0].id or "", conversation_id=talk.id)
        await client.update(talk.id, metadata={"c": "d"})
        await api.openai.responses.create(model=NAME, input="Four", conversation=talk.id)
        assert "Zero" not in prompt(api)
        assert "Three" in prompt(api)
        assert (await client.delete(talk.id)).deleted
        error = (await api.post(PATH, body("x", conversation=talk.id), 400))["error"]
        assert error["param"] == "conversation"
        with pytest.raises(openai.NotFoundError):
            await client.retrieve(talk.id)
        for wrong in ({"items": [{"type": "novel"}]}, {"items": [{"role": "user", "content": "x"}] * 21}):
            assert (await api.post("/v1/conversations", wrong, 400))["error"]["param"] == "items"


async def test_background_response_completes(tmp_path: Path) -> None:
    async with storing(tmp_path, engine=FakeEngine(scripted(b"Hello", EOS), eos=[EOS], step_seconds=0.01)) as api:
        begun = await api.openai.responses.create(model=NAME, input="Hi", background=True)
        assert (begun.status, begun.background) == ("queued", True)
        now = await at_its_end(api, begun.id)
        assert (now.status, now.output_text) == ("completed", "Hello")
        assert (await api.http.get(f"{PATH}/{begun.id}?stream=true")).json()["error"]["param"] == "stream"


async def test_background_stream_continues_without_reader(tmp_path: Path) -> None:
    text = b"Hello" * 20
    engine = FakeEngine(scripted(text, EOS), eos=[EOS], step_seconds=0.02)
    async with (
        serving(engine, data_dir=tmp_path) as port,
        openai.AsyncOpenAI(base_url=f"{port.url}/v1", api_key="none") as client,
    ):
        begun = await client.responses.create(model=NAME, input="Hi", background=True, stream=True)
        seen = [await anext(aiter(begun)) for _ in range(2)]
        id, number = seen[0].response.id, seen[-1].sequence_number
        await begun.close()
        assert (await client.responses.retrieve(id)).status == "in_progress"
        resumed = await client.responses.retrieve(id, stream=True, starting_after=number)
        rest = [event async for event in resumed]
        assert [event.sequence_number for event in rest] == list(range(number + 1, number + 1 + len(rest)))
        assert rest[-1].type == "response.completed"
        deltas = [event.delta for event in rest if event.type == "response.output_text.delta"]
        assert text.decode().endswith("".join(deltas))
        assert len(deltas) > 50, "it was followed while it was written"
        again = [event async for event in await client.responses.retrieve(id, stream=True, starting_after=0)]
        assert again == rest[-1:]
        assert (await client.responses.retrieve(id)).output_text == text.decode()


async def test_background_response_can_be_cancelled_or_deleted(tmp_path: Path) -> None:
    async with storing(tmp_path, engine=FakeEngine(hashed(b"ab"), step_seconds=0.01)) as api:
        begun = [await api.openai.responses.create(model=NAME, input="Hi", background=True) for _ in range(2)]
        await api.engine.sent.wait()
        cancelled = await api.openai.responses.cancel(begun[0].id)
        assert (cancelled.status, (await api.openai.responses.retrieve(begun[0].id)).status) == ("cancelled",) * 2
        await api.openai.responses.delete(begun[1].id)
        assert not api.engine.running
        assert (await api.http.get(f"{PATH}/{begun[1].id}")).status_code == 404
        error = (await api.post(PATH, body(previous_response_id=begun[0].id), 400))["error"]
        assert "cancelled" in error["message"]
        whole = await api.post(PATH, body(max_output_tokens=1))
        assert (await api.http.post(f"{PATH}/{whole['id']}/cancel")).status_code == 400


async def test_background_response_reports_failure_and_resumes_after_restart(tmp_path: Path) -> None:
    async with storing(tmp_path, engine=FakeEngine(hashed(b"ab"), fail_at=3)) as api:
        begun = await api.openai.responses.create(model=NAME, input="Hi", background=True)
        now = await at_its_end(api, begun.id)
        assert now.status == "failed"
        assert now.error is not None
        assert now.error.message == "the engine tripped"
    async with storing(tmp_path, engine=FakeEngine(hashed(b"ab"), step_seconds=0.01)) as api:
        left = await api.openai.responses.create(model=NAME, input="Hi", background=True)
    async with storing(tmp_path, engine=FakeEngine(hashed(b"ab"), eos=[EOS])) as api:
        ended = await at_its_end(api, left.id)
        assert (ended.status, ended.id) == ("incomplete", left.id), "the next server goes on with it"
        whole = await api.openai.responses.create(model=NAME, input="Hi", extra_body={"seed": api.engine.seen[0].seed})
        assert ended.output_text == whole.output_text
    async with storing(tmp_path) as api:
        assert (await api.openai.responses.retrieve(left.id)).status == "incomplete"
        assert not api.engine.seen


@pytest.mark.parametrize("stream", [False, True])
async def test_background_response_resumes_in_next_server_after_engine_death(stream: bool, tmp_path: Path) -> None:
    request = body(background=True, stream=stream, max_output_tokens=40)
    async with storing(tmp_path, engine=FakeEngine(hashed(b"ab"), step_seconds=0.01)) as api:
        call = asyncio.create_task(api.http.post(PATH, json=request))
        await api.engine.sent.wait()
        await asyncio.sleep(0.05)
        api.engine.die("the engine could not be restarted")
        response = await call
        id = events_of(response.text)[0]["response"]["id"] if stream else response.json()["id"]
        assert "response.failed" not in response.text, "whoever follows it learns the end from the next server"
        await asyncio.sleep(0.1)
        assert (await api.http.get(f"{PATH}/{id}")).json()["status"] in ("queued", "in_progress")
        if stream:
            assert (await api.http.get(f"{PATH}/{id}?stream=true")).status_code == 503, "it has not ended"
    async with storing(tmp_path, engine=FakeEngine(hashed(b"ab"))) as api:
        ended = await at_its_end(api, id)
        assert ended.status == "incomplete"
        whole = await api.openai.responses.create(
            model=NAME, input="Hi", max_output_tokens=40, extra_body={"seed": api.engine.seen[0].seed}
        )
        assert ended.output_text == whole.output_text


async def test_background_response_resumes_when_engine_is_back(tmp_path: Path) -> None:
    """As after a model was unloaded, or after the server's main process did not respond for a while."""
    async with storing(tmp_path, engine=FakeEngine(hashed(b"ab"), step_seconds=0.01)) as api:
        begun = await api.openai.responses.create(model=NAME, input="Hi", background=True, max_output_tokens=40)
        await api.engine.sent.wait()
        await asyncio.sleep(0.05)
        api.runtime.client.end_all(Overloaded("please try again"))
        ended = await at_its_end(api, begun.id)
        assert (ended.status, len(api.engine.seen)) == ("incomplete", 2)
        assert api.engine.seen[1].emitted_ids, "from the tokens that it had"


async def test_item_references_resolve_to_stored_items(tmp_path: Path) -> None:
    async with storing(tmp_path, TWO) as api:
        first = await api.post(PATH, body("One", tools=TOOLS))
        calls = first["output"]
        results = [{"type": "function_call_output", "call_id": each["call_id"], "output": "20"} for each in calls]
        question = {"role": "user", "content": "One"}
        whole = [question, *calls, *results]
        await api.post(PATH, body(whole, tools=TOOLS, store=False))
        expected_prompt = prompt(api)
        stored = await api.post(PATH, body([question, *({"id": each["id"]} for each in calls), *results], tools=TOOLS))
        assert prompt(api) == expected_prompt
        named = [{"type": "item_reference", "id": each["id"]} for each in calls]
        await api.post(PATH, body([question, *named, *results], tools=TOOLS))
        assert prompt(api) == expected_prompt
        listed = (await api.http.get(f"{PATH}/{stored['id']}/input_items?order=asc")).json()["data"]
        assert [each["type"] for each in listed] == ["message", *["function_call"] * 2, *["function_call_output"] * 2]
        near = {"type": "item_reference", "id": listed[0]["id"]}
        await api.post(PATH, body([near], previous_response_id=stored["id"]))
        assert prompt(api).count("user\nOne") == 2
        for id in ("msg_1", "", first["id"], calls[0]["id"][:-1] + "f"):
            error = (await api.post(PATH, body([{"type": "item_reference", "id": id}]), 400))["error"]
            assert (error["param"], "is not stored here" in error["message"]) == ("input", True)
    async with storing(tmp_path, api_key=["other"]) as api:
        api.http.headers["x-api-key"] = "other"
        error = (await api.post(PATH, body(named), 400))["error"]
        assert "is not stored here" in error["message"], "another key's"


async def test_items_added_to_conversation_per_response_are_bounded(tmp_path: Path) -> None:
    """The items are written in one transaction, which other writers wait for."""
    messages = [{"role": "user", "content": ""}] * 1000
    async with storing(tmp_path) as api:
        talk = await api.post("/v1/conversations", {})
        items = f"/v1/conversations/{talk['id']}/items"
        error = (await api.post(PATH, body([*messages, messages[0]], conversation=talk["id"]), 400))["error"]
        assert (error["param"], error["message"][:21]) == ("input", "input: a request adds")
        assert not (await api.http.get(items)).json()["data"]
        await api.post(PATH, body([*messages, messages[0]]))
        await api.post(PATH, body(messages, conversation=talk["id"]))
        assert (await api.http.get(items)).json()["has_more"]


async def test_conversation_items_and_bytes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_ITEMS", 3)
    for room in (history, conversations):
        monkeypatch.setattr(room, "CONVERSATION_BOUNDS", ConversationLimits(3, 1 << 20))
    message = {"role": "user", "content": "Hi"}
    async with storing(tmp_path, "Fine.") as api:
        talk = await api.post("/v1/conversations", {"items": [message, message]})
        items = f"/v1/conversations/{talk['id']}/items"
        error = (await api.post(items, {"items": [message, message]}, 400))["error"]
        assert (error["param"], "begin another one" in error["message"]) == ("items", True)
        assert len((await api.http.get(items)).json()["data"]) == 2
        await api.post(items, {"items": [message]})
        monkeypatch.setattr(history, "MAX_INPUT_BYTES", 1000)
        for field, path in (("items", items), ("items", "/v1/conversations"), ("input", PATH)):
            sent = body([{"role": "user", "content": "x" * 1000}]) if path == PATH else {}
            error = (await api.post(path, sent or {"items": [{"role": "user", "content": "x" * 1000}]}, 400))["error"]
            assert error["param"] == field
            assert "1000 bytes" in error["message"]


async def test_conversation_items_are_added_without_reading_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop's process never parses stored items: here they are broken JSON."""
    async with storing(tmp_path, "Fine.") as api:
        talk = await api.post("/v1/conversations", {"items": [{"role": "user", "content": "Zero"}]})
        with sqlite3.Connection(tmp_path / DATABASE_FILE) as database:
            database.execute("update items set data = cast('{broken' as blob)")
        items = f"/v1/conversations/{talk['id']}/items"
        added = await api.post(items, {"items": [{"role": "user", "content": "One"}]})
        listed = await api.http.get(items, params={"limit": 1})
        assert listed.json() == {**added, "has_more": True}
        assert (await api.http.get(items)).text.endswith(f'"last_id":"{_first(tmp_path)}","has_more":false}}')
        assert (await api.http.get(f"{items}/{_first(tmp_path)}")).text == "{broken"
        assert (await api.http.delete(f"{items}/{_first(tmp_path)}")).json()["id"] == talk["id"]
        await api.post(PATH, body("Two", conversation=talk["id"]))
        assert [each["role"] for each in (await api.http.get(items)).json()["data"]] == ["assistant", "user", "user"]


def _first(folder: Path) -> str:
    with sqlite3.Connection(folder / DATABASE_FILE) as database:
        return str(database.execute("select id from items order by place limit 1").fetchone()[0])


async def test_response_chain_bytes_are_bounded(tmp_path: Path) -> None:
    async with storing(tmp_path, "Fine.") as api:
        answer = await api.post(PATH, body("One"))
        with sqlite3.Connection(tmp_path / DATABASE_FILE) as database:
            database.execute("update objects set size = ?", (history.MAX_HISTORY_BYTES + 1,))
        error = (await api.post(PATH, body("Two", previous_response_id=answer["id"]), 400))["error"]
        assert (error["param"], "bytes precede it" in error["message"]) == ("previous_response_id", True)
