"""The Responses API over a WebSocket: the same events as a stream, continued conversations, lanes, errors; against the
OpenAI SDK's own types.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from openai.types.responses import ResponsesServerEvent
from pydantic import TypeAdapter

from quire.engine.common.types import EngineCoreRequest
from quire.server.pipeline import resolve
from quire.server.routes.websocket import responses_socket
from tests.server.api import NAME
from tests.server.fake import FakeEngine, hashed, scripted
from tests.server.hosted import idle, serving
from tests.server.openai_responses import events_of, folded
from tests.server.resolve.test_tool_requests import HERMES
from tests.server.routes.test_responses import PATCHED, PATH, TOOLS, TWO, WEATHER
from tests.server.routes.test_streams import read_stream
from tests.server.scripted import TEMPLATE, ScriptedEngine
from tests.server.websocket_client import BINARY, TEXT, frame, open_websocket

EOS = 258
SERVER_EVENTS = {
    get_args(each.model_fields["type"].annotation)[0]: TypeAdapter(each)
    for each in get_args(get_args(ResponsesServerEvent)[0])
}
"""Validators of OpenAI's WebSocket server events, by event type."""
LETTERS = hashed(b"abcdefgh")


def speaker(text: str, **options: Any) -> FakeEngine:
    return FakeEngine(scripted(text.encode(), EOS), eos=[EOS], max_model_len=4096, **options)


def validate_events(events: Sequence[Any]) -> list[Any]:
    for event in events:
        SERVER_EVENTS[event["type"]].validate_python(event, strict=True)
    return list(events)


def mask_ids(events: Sequence[Any]) -> str:
    """JSON without the fields that differ between two answers to the same request."""
    text = json.dumps([{name: value for name, value in event.items() if name != "stream_id"} for event in events])
    text = re.sub(r'"(resp|msg|rs|fc|ctc|call)_?[^"]*"', '"id"', text)
    return re.sub(r'"(created_at|completed_at)": \d+', '"at": 0', text)


def prompt(request: EngineCoreRequest) -> str:
    return bytes(token for token in request.prompt_ids if token < 256).decode()


@pytest.mark.parametrize("stream_id", [None, "main.1"])
async def test_websocket_sends_same_events_as_stream(stream_id: str | None) -> None:
    engine = speaker(f"<think>Hm.</think>Let me see.\n{TWO}\n{PATCHED}")
    body = {"model": NAME, "input": "Hello", "tools": TOOLS, "instructions": "Be brief.", "metadata": {"a": "b"}}
    lane = {} if stream_id is None else {"stream_id": stream_id}
    async with (
        serving(engine, chat_template=HERMES, reasoning_parser="think") as port,
        httpx.AsyncClient(base_url=port.url) as http,
        open_websocket(port.number) as socket,
    ):
        streamed = events_of((await http.post(PATH, json={**body, "stream": True})).text)
        await socket.create(**body, **lane)
        events = validate_events(await socket.events(stream_id))
    assert mask_ids(events) == mask_ids(streamed)
    assert len(events) > 50
    assert engine.seen[0].prompt_ids == engine.seen[1].prompt_ids


@pytest.mark.few(1)
@pytest.mark.parametrize("where", ["event loop", "worker"])
async def test_twenty_tool_turns_have_prompts_of_whole_conversation(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is stored on disk: each turn sends only a call's output."""
    monkeypatch.setattr(resolve, "SMALL_BYTES", 2048 if where == "worker" else 1 << 20)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    turns = [*[call] * 20, "Done."]
    settings: Any = {"chat_template": TEMPLATE, "tool_call_parser": "hermes", "reasoning_parser": "think"}
    about: dict[str, Any] = {"model": NAME, "tools": [WEATHER], "instructions": "Use tools.", "store": False}
    async with serving(ScriptedEngine(turns), **settings) as port:
        engine: Any = port.server._models.loaded_runtimes[0].client.engine_core
        talk: list[Any] = [{"role": "user", "content": "Weather?"}]
        async with open_websocket(port.number) as socket:
            answer = await socket.answer(**about, input=talk)
            for _ in range(20):
                (item,) = answer["output"]
                result = {"type": "function_call_output", "call_id": item["call_id"], "output": f"Rain {item['id']}"}
                talk += [item, result]
                answer = await socket.answer(**about, input=[result], previous_response_id=answer["id"])
                assert answer["status"] == "completed"
        assert answer["output"][0]["content"][0]["text"] == "Done."
        async with httpx.AsyncClient(base_url=port.url) as http:
            await http.post(PATH, json={**about, "input": talk})
    *_, last, whole = engine.seen
    assert last.prompt_ids == whole.prompt_ids
    assert prompt(whole).count("Rain fc_") == 20


async def test_lanes_run_together_and_each_in_order() -> None:
    engine = FakeEngine(LETTERS, step_seconds=0.005)
    async with serving(engine) as port, open_websocket(port.number) as socket:
        for lane in ("a", "b", "a"):
            await socket.create(model=NAME, input="Hi", max_output_tokens=10, stream_id=lane)
        events: list[Any] = []
        while sum(event["type"] == "response.incomplete" for event in events) < 3:
            events.append(await socket.receive())
    order = [(event["stream_id"], event["type"]) for event in validate_events(events)]
    ends = [at for at, each in enumerate(order) if each == ("a", "response.incomplete")]
    begins = [at for at, each in enumerate(order) if each == ("a", "response.created")]
    assert begins[0] < ends[0] < begins[1] < ends[1]
    assert order.index(("b", "response.created")) < ends[0], "other lanes do not wait"


async def test_conversation_forks_to_another_lane_and_ends_with_its_connection() -> None:
    async with serving(speaker("Yes."), chat_template=HERMES) as port, open_websocket(port.number) as socket:
        engine: Any = port.server._models.loaded_runtimes[0].client.engine_core
        first = await socket.answer(model=NAME, input="One", stream_id="a")
        fork = await socket.answer(model=NAME, input="Two", stream_id="b", previous_response_id=first["id"])
        assert fork["previous_response_id"] == first["id"]
        assert prompt(engine.seen[-1]).index("One") < prompt(engine.seen[-1]).index("Yes.")
        again = await socket.answer(model=NAME, input="Three", stream_id="a", previous_response_id=first["id"])
        assert "Two" not in prompt(engine.seen[-1])
        lost = await socket.answer(model=NAME, input="Four", stream_id="a", previous_response_id=first["id"])
        async with open_websocket(port.number) as other:
            foreign = await other.answer(model=NAME, input="Five", previous_response_id=again["id"])
        for error in validate_events([lost, foreign]):
            assert (error["status"], error["error"]["code"]) == (400, "previous_response_not_found")
            assert error["error"]["param"] == "previous_response_id"
        assert lost["stream_id"] == "a"
        resumed = await socket.answer(model=NAME, input="Six", stream_id="b", previous_response_id=fork["id"])
        assert resumed["status"] == "completed", "an error ends only its own request"
        reference = {"type": "item_reference", "id": resumed["output"][0]["id"]}
        about = {"model": NAME, "previous_response_id": resumed["id"], "stream_id": "b"}
        assert (await socket.answer(**about, input=[reference, {"role": "user", "content": "!"}]))["status"]
        missing = await socket.answer(model=NAME, input=[{**reference, "id": "msg_0"}])
        assert missing["error"]["param"] == "input"


async def test_stored_response_continues_on_another_connection(tmp_path: Path) -> None:
    async with serving(speaker("Yes."), chat_template=HERMES, data_dir=tmp_path) as port:
        engine: Any = port.server._models.loaded_runtimes[0].client.engine_core
        async with open_websocket(port.number) as socket:
            first = await socket.answer(model=NAME, input="One")
            second = await socket.answer(model=NAME, input="Two", previous_response_id=first["id"])
            assert second["store"] is True
        async with open_websocket(port.number) as socket, httpx.AsyncClient(base_url=port.url) as http:
            assert (await http.get(f"{PATH}/{second['id']}")).json() == second
            third = await socket.answer(model=NAME, input="Three", previous_response_id=second["id"], store=False)
            assert re.findall("One|Two|Three", prompt(engine.seen[-1])) == ["One", "Two", "Three"]
            refused = await socket.answer(model=NAME, input="Four", previous_response_id=third["id"])
            assert refused["error"]["param"] == "store"
            fourth = await socket.answer(model=NAME, input="Four", previous_response_id=third["id"], store=False)
            assert fourth["status"] == "completed"
            posted = await http.post(PATH, json={"model": NAME, "input": "Five", "previous_response_id": third["id"]})
            assert posted.json()["error"]["code"] == "previous_response_not_found"


async def test_response_that_generates_nothing_can_be_continued() -> None:
    async with serving(speaker("Yes."), chat_template=HERMES) as port, open_websocket(port.number) as socket:
        engine: Any = port.server._models.loaded_runtimes[0].client.engine_core
        await socket.create(model=NAME, input="One", generate=False, tools=TOOLS, max_output_tokens=7)
        events = validate_events(await socket.events())
        kinds = [event["type"] for event in events]
        assert kinds == ["response.created", "response.in_progress", "response.completed"]
        warm = events[-1]["response"]
        assert (warm["output"], warm["max_output_tokens"], warm["usage"]["output_tokens"]) == ([], 7, 0)
        assert engine.seen[-1].params.max_tokens == 1
        answer = await socket.answer(model=NAME, input=[], previous_response_id=warm["id"], tools=TOOLS)
        assert engine.seen[-1].prompt_ids == engine.seen[-2].prompt_ids
        assert answer["output"][0]["content"][0]["text"] == "Yes."
        async with httpx.AsyncClient(base_url=port.url) as http:
            whole = (await http.post(PATH, json={"model": NAME, "input": "One", "generate": False})).json()
        assert (whole["status"], whole["output"]) == ("completed", [])


WRONG_EVENTS: dict[str, tuple[dict[str, Any], str | None, str | None]] = {
    "no type": ({}, "type", None),
    "an unknown type": ({"type": "response.cancel"}, "type", None),
    "a type that is a number": ({"type": 7}, "type", None),
    "no stream": ({"type": "response.create", "stream": False}, "stream", None),
    "the background": ({"type": "response.create", "background": True}, "background", None),
    "the background as a number": ({"type": "response.create", "background": 1}, "background", None),
    "an empty lane": ({"type": "response.create", "stream_id": ""}, "stream_id", "invalid_stream_id"),
    "a lane with a space": ({"type": "response.create", "stream_id": "a b"}, "stream_id", "invalid_stream_id"),
    "a lane that is a list": ({"type": "response.create", "stream_id": [1]}, "stream_id", "invalid_stream_id"),
    "a long lane": ({"type": "response.create", "stream_id": "a" * 257}, "stream_id", "invalid_stream_id"),
    "a wrong previous response": ({"type": "response.create", "previous_response_id": 5}, "previous_response_id", None),
    "a wrong input": ({"type": "response.create", "input": 5}, "input", None),
    "generate that is a list": ({"type": "response.create", "generate": []}, "generate", None),
    "an unknown tool": ({"type": "response.create", "tools": [{"type": "computer"}]}, "tools", None),
    "an unknown model": ({"type": "response.create", "model": "other"}, None, "model_not_found"),
    "a chat's field": ({"type": "response.create", "messages": [{}]}, "messages", None),
    "a deep one": ({"type": "response.create", "metadata": json.loads("[" * 200 + "]" * 200)}, None, None),
}


async def test_wrong_events_name_their_field_and_connection_goes_on() -> None:
    async with serving(speaker("Yes."), chat_template=HERMES) as port, open_websocket(port.number) as socket:
        for name, (event, param, code) in WRONG_EVENTS.items():
            await socket.send({"model": NAME, "input": "Hi", **event})
            (error,) = validate_events([await socket.receive()])
            assert error["type"] == "error", (name, error)
            assert error["status"] == (404 if code == "model_not_found" else 400), name
            assert (error["error"]["code"], code or error["error"]["param"]) == (code, code or param), (name, error)
        raw = [b"{", b"", b"null", b"[]", b'"a"', b'{"type":"response.create"} {}', b'{"type":"response.create",}']
        nested = b'{"type":"response.create","input":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        for content in (*raw, nested, b'{"type":"response.create","input":NaN}'):
            await socket.send_frames(frame(TEXT, content))
            assert (await socket.receive())["error"]["type"] == "invalid_request_error", content[:50]
        await socket.send_frames(frame(BINARY, b'{"type":"response.create"}'))
        assert "binary" in (await socket.receive())["error"]["message"]
        steer = {"type": "response.steer", "previous_response_id": "resp_1", "input": "Stop."}
        await socket.send(steer)
        (failed,) = validate_events([await socket.receive()])
        assert failed["error"]["code"] == "steering_not_supported"
        assert failed["steer"] == {"previous_response_id": "resp_1", "input": "Stop."}
        assert (await socket.answer(model=NAME, input="Hi"))["status"] == "completed"


async def test_thirty_third_named_lane_is_refused_and_known_ones_go_on() -> None:
    async with serving(speaker("Y")) as port, open_websocket(port.number) as socket:
        for number in range(32):
            assert (await socket.answer(model=NAME, input="Hi", stream_id=f"l{number}", generate=False))["id"]
        error = await socket.answer(model=NAME, input="Hi", stream_id="l32")
        assert (error["error"]["code"], error["stream_id"]) == ("websocket_stream_limit_reached", "l32")
        for known in ({}, {"stream_id": "l0"}):
            assert (await socket.answer(model=NAME, input="Hi", **known))["status"] == "completed"


async def test_sixteen_responses_run_and_sixty_four_more_wait() -> None:
    engine = FakeEngine(LETTERS, max_model_len=100_000, step_seconds=0.01)
    async with serving(engine) as port, open_websocket(port.number) as socket:
        for number in range(20):
            await socket.create(model=NAME, input="Hi", max_output_tokens=9000, stream_id=f"l{number}")
        created = set()
        while len(created) < 16:
            event = await socket.receive()
            created.add(event["stream_id"])
        for _ in range(61):
            await socket.create(model=NAME, input="Hi", stream_id="l0")
        while (event := await socket.receive())["type"] != "error":
            created.add(event["stream_id"])
        assert (len(created), len(engine.seen)) == (16, 16)
        assert (event["status"], event["error"]["code"]) == (429, "websocket_queue_full")


async def test_disconnect_aborts_all_lanes() -> None:
    engine = FakeEngine(LETTERS, max_model_len=100_000, step_seconds=0.002)
    async with serving(engine) as port:
        async with open_websocket(port.number) as socket:
            for lane in ("a", "a", "b"):
                await socket.create(model=NAME, input="Hi", max_output_tokens=90_000, stream_id=lane)
            while len(engine.running) < 2:
                await socket.receive()
        await idle(engine)
        assert sorted(engine.aborted) == sorted(each.id for each in engine.seen)
        assert len(engine.seen) == 2, "what waited is dropped"


@pytest.mark.parametrize("headers", [[], ["X-Keep-Alive-Seconds: 30"]])
async def test_interrupted_response_is_resumed_as_a_stream(headers: list[str], tmp_path: Path) -> None:
    """The journal has the body that a POST would have sent."""
    body: dict[str, Any] = {"model": NAME, "input": "Hi", "max_output_tokens": 40, "seed": 1}
    engine = FakeEngine(LETTERS, step_seconds=0.005)
    async with serving(engine, data_dir=tmp_path) as port:
        async with open_websocket(port.number, *headers) as socket:
            await socket.create(**body, stream_id="a")
            for _ in range(10):
                event = await socket.receive()
            id = event["item_id"].removeprefix("msg_")[:-4]
        await idle(engine)
        assert bool(engine.aborted) == (not headers), "it continues without a reader only on request"
        resumed = events_of((await read_stream(port.url, f"/v1/streams/resp_{id}")).decode())
        whole = events_of((await read_stream(port.url, PATH, body)).decode())
    assert mask_ids(resumed) == mask_ids(whole)
    assert folded(resumed)["id"] == f"resp_{id}"


async def test_drained_server_finishes_responses_and_closes_with_going_away() -> None:
    engine = FakeEngine(LETTERS, step_seconds=0.01)
    async with serving(engine) as port, open_websocket(port.number) as socket, open_websocket(port.number) as idle_one:
        await socket.create(model=NAME, input="Hi", max_output_tokens=40, stream_id="a")
        await socket.receive()
        draining = asyncio.create_task(port.server.drain_requests())
        await asyncio.sleep(0)
        await socket.create(model=NAME, input="Hi", stream_id="b")
        events = [await socket.receive()]
        while events[-1]["type"] != "response.incomplete":
            events.append(await socket.receive())
        (error,) = (each for each in events if each["type"] == "error")
        assert (error["status"], error["stream_id"], error["error"]["headers"]) == (503, "b", {"retry-after": "1"})
        assert len(events[-1]["response"]["output"][0]["content"][0]["text"]) == 40
        assert await socket.wait_closed() == 1001
        assert await idle_one.wait_closed() == 1001
        await draining


async def test_connection_ends_after_an_hour_when_its_responses_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_socket, "MAX_CONNECTION_SECONDS", 0.2)
    engine = FakeEngine(LETTERS, step_seconds=0.01)
    async with serving(engine) as port, open_websocket(port.number) as socket:
        await socket.create(model=NAME, input="Hi", max_output_tokens=40)
        await asyncio.sleep(0.3)
        await socket.create(model=NAME, input="Hi", stream_id="late")
        events = []
        while (event := await socket.receive()) is not None:
            events.append(event)
    errors = [event for event in validate_events(events) if event["type"] == "error"]
    assert [error["error"]["code"] for error in errors] == ["websocket_connection_limit_reached"] * 2
    assert [error.get("stream_id") for error in errors] == ["late", None]
    assert [event["type"] for event in events[-2:]] == ["response.incomplete", "error"]
    assert socket.close_code == 1001


async def test_each_response_is_logged_counted_and_explained(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "quire.access")
    async with serving(speaker("Yes.")) as port, httpx.AsyncClient(base_url=port.url) as http:
        async with open_websocket(port.number, "X-Request-Id: mine") as socket:
            assert socket.headers["x-request-id"] == "mine"
            ids = [(await socket.answer(model=NAME, input="Hi"))["id"] for _ in range(2)]
            assert "quire:websocket_connections 1.0" in (await http.get("/metrics")).text
            await socket.answer(model=NAME, input=7)
        assert len({*ids}) == 2
        for id in ids:
            assert (await http.get(f"/v1/requests/{id}/explain")).status_code == 200
        async with asyncio.timeout(10):
            while "websocket_connections 0.0" not in (metrics := (await http.get("/metrics")).text):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert 'http_requests_total{handler="/v1/responses",method="POST",status="2xx"} 2.0' in metrics
    lines = [record.getMessage().partition(" in ")[0] for record in caplog.records if PATH in record.getMessage()]
    assert lines[:3] == [f"POST {PATH} 200", f"POST {PATH} 200", f"POST {PATH} 400"]
    assert f"GET {PATH} 101" in lines


async def test_failed_engine_ends_response_with_failed_event() -> None:
    engine = FakeEngine(LETTERS, fail_at=5)
    async with serving(engine) as port, open_websocket(port.number) as socket:
        await socket.create(model=NAME, input="Hi", max_output_tokens=40)
        assert validate_events(await socket.events())[-1]["type"] == "response.failed"
        assert (await socket.answer(model=NAME, input="Hi", generate=False))["status"] == "completed"
