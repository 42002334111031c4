"""Streams resume where their reader was cut off, to the byte, on the same server or the next; and Idempotency-Key."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.api import NAME
from tests.server.fake import FakeEngine, hashed, scripted
from tests.server.hosted import Port, serving
from tests.server.resolve.test_tool_requests import HERMES, TOOLS, TWO
from tests.server.routes.test_chat_custom_tools import PATCH, PATCHED

EOS = 258
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 24}
LETTERS = b"abcdefghijklmnop .\xc3\xa9"
THOUGHT = b"<think>Well</think>" + TWO.encode()
CALLS: dict[str, tuple[str, bytes | None, dict[str, Any]]] = {
    "chat": (CHAT, None, TEXT),
    "two": (CHAT, None, TEXT | {"n": 2, "stream_options": {"include_usage": True}}),
    "logprobs": (CHAT, None, TEXT | {"logprobs": True, "top_logprobs": 2}),
    "stop": (CHAT, None, TEXT | {"stop": ["a", "bc"], "max_tokens": 400}),
    "usage": (CHAT, None, TEXT | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    "tools": (CHAT, THOUGHT, TEXT | {"tools": TOOLS, "max_tokens": 400}),
    "custom tool": (CHAT, PATCHED.encode(), TEXT | {"tools": [PATCH], "max_tokens": 400}),
    "completion": (COMPLETIONS, None, {"prompt": ["Hi", "Ho"], "max_tokens": 12, "echo": True}),
    "prompt": (COMPLETIONS, None, {"prompt": "Hi", "max_tokens": 12, "echo": True, "logprobs": 1}),
    "response": (
        "/v1/responses",
        THOUGHT,
        {"input": "Hi", "tools": [{"type": "function", **t["function"]} for t in TOOLS]},
    ),
    "message": ("/v1/messages", None, TEXT),
    "receipt": (CHAT, None, TEXT | {"receipt": True, "stop": ["ab"]}),
}


@asynccontextmanager
async def keeping(folder: Path, answer: bytes | None = None, **options: Any) -> AsyncIterator[tuple[Port, FakeEngine]]:
    pick = hashed(LETTERS) if answer is None else scripted(answer, EOS)
    engine = FakeEngine(pick, eos=[EOS], max_model_len=2048, **{"burst": 3} | options.pop("engine", {}))
    settings = {"data_dir": folder, "chat_template": HERMES, "reasoning_parser": "think", **options}
    async with serving(engine, **settings) as port:
        yield port, engine


@asynccontextmanager
async def open_http(folder: Path, **options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, FakeEngine]]:
    async with keeping(folder, **options) as (port, engine), httpx.AsyncClient(base_url=port.url, timeout=30) as http:
        yield http, engine


async def read_stream(
    url: str, path: str, body: dict[str, Any] | None = None, events: int | None = None, **headers: str
) -> bytes:
    """Return what a stream sends, or its first events, after which the connection is closed."""
    received = b""
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        content = {"json": {"model": NAME, "stream": True, **body}} if body is not None else {}
        async with http.stream("GET" if body is None else "POST", path, headers=headers, **content) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for piece in answer.aiter_bytes():
                received += piece
                if events is not None and received.count(b"\n\n") >= events:
                    return b"".join(each + b"\n\n" for each in received.split(b"\n\n")[:events])
    return received


def ids(events: bytes) -> list[str]:
    event_ids = re.findall(rb"^id: (.*)$", events, re.MULTILINE)
    assert len(event_ids) == events.count(b"\n\n"), "each event has one"
    return [each.decode() for each in event_ids]


def events_by_choice(events: bytes) -> dict[bytes, list[bytes]]:
    """Return the events of each choice, to the byte except for the time at which a response was completed. The events
    of a single choice keep their ids.
    """
    by_index: dict[bytes, list[bytes]] = {}
    for event in events.split(b"\n\n"):
        index = re.search(rb'"index":(\d)', event)
        choice = b"" if index is None else index[1]
        by_index.setdefault(choice, []).append(re.sub(rb'"completed_at":\d+', b'"completed_at":0', event))
    if re.search(rb"^id: [^:]*:\d+\.\d+\.\d+$", events, re.MULTILINE):
        return by_index
    return {
        choice: [re.sub(rb"^id: .*\n", b"", each) for each in choice_events]
        for choice, choice_events in by_index.items()
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CALLS)
async def test_stream_resumes_bytewise_from_any_event(name: str, tmp_path: Path) -> None:
    path, answer, body = CALLS[name]
    async with keeping(tmp_path, answer) as (port, _):
        whole = await read_stream(port.url, path, body)
        names = ids(whole)
        assert len(set(names)) == len(names)
        stream = names[0].rpartition(":")[0]
        assert events_by_choice(await read_stream(port.url, f"/v1/streams/{stream}")) == events_by_choice(whole), (
            "from the begin"
        )
        pieces = [each + b"\n\n" for each in whole.split(b"\n\n")[:-1]]
        for cut in {0, 1, len(names) // 2, len(names) - 2, len(names) - 1}:
            rest = await read_stream(port.url, f"/v1/streams/{stream}", **{"Last-Event-ID": names[cut]})
            assert events_by_choice(rest) == events_by_choice(b"".join(pieces[cut + 1 :]))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["chat", "two", "tools", "logprobs", "response", "message", "receipt"])
async def test_stream_resumes_on_next_server(name: str, tmp_path: Path) -> None:
    """The reader leaves in the middle, and so does the server, twice; a POST with Last-Event-ID resumes."""
    path, answer, body = CALLS[name]
    slow = {"step_seconds": 0.01, "burst": 1}
    async with keeping(tmp_path, answer, engine=slow) as (port, _):
        received = await read_stream(port.url, path, body, events=5)
    async with keeping(tmp_path, answer, engine=slow) as (port, engine):
        received += await read_stream(port.url, path, {"messages": 5}, events=4, **{"Last-Event-ID": ids(received)[-1]})
        (first, *_) = engine.seen
    async with keeping(tmp_path, answer) as (port, engine):
        last = ids(received)[-1]
        received += await read_stream(port.url, f"/v1/streams/{last.rpartition(':')[0]}", **{"Last-Event-ID": last})
        assert {each.seed for each in engine.seen} >= {first.seed}
        known = [len(each.emitted_ids) for each in engine.seen]
        assert (max(known) > 0) is (name != "logprobs"), "tokens of the journal are not computed again"
        whole = await read_stream(port.url, f"/v1/streams/{last.rpartition(':')[0]}")
    assert events_by_choice(received) == events_by_choice(whole)


@pytest.mark.slow
async def test_reconnecting_reader_takes_stream_over(tmp_path: Path) -> None:
    path, _, body = CALLS["chat"]
    async with keeping(tmp_path, engine={"step_seconds": 0.02, "burst": 1}) as (port, engine):
        first = asyncio.create_task(read_stream(port.url, path, body | {"max_tokens": 100}))
        async with asyncio.timeout(20):
            while not engine.seen or engine.positions[engine.seen[0].id] < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        stream = engine.seen[0].id.rpartition("-")[0]
        whole = await read_stream(port.url, f"/v1/streams/{stream}")
        assert whole.startswith(part := await first)
        assert len(part) < len(whole)
        assert len(engine.seen) == 2
        assert engine.aborted[0] == engine.seen[0].id


async def test_only_one_of_concurrent_readers_gets_whole_stream(tmp_path: Path) -> None:
    path, _, body = CALLS["chat"]
    async with keeping(tmp_path, engine={"step_seconds": 0.01, "burst": 1}) as (port, engine):
        begun = await read_stream(port.url, path, body | {"max_tokens": 60}, 3)
        again = f"/v1/streams/{ids(begun)[0].partition(':')[0]}"
        streams = await asyncio.gather(*(read_stream(port.url, again) for _ in range(4)))
        whole = [each for each in streams if each.endswith(b"data: [DONE]\n\n")]
        assert len(whole) == 1
        assert all(whole[0].startswith(each) for each in (begun, *streams))
        assert len(set(engine.aborted)) == len(engine.seen) - 1, "each was ended before the next one began"
        assert await read_stream(port.url, again) == whole[0], "no claim is left"


async def test_resume_rejects_unknown_foreign_and_expired_streams(tmp_path: Path) -> None:
    path, _, body = CALLS["chat"]
    async with keeping(tmp_path, api_key=["ka", "kb"]) as (port, _), httpx.AsyncClient(base_url=port.url) as http:
        http.headers["x-api-key"] = "ka"
        answer = await http.post(path, json={"model": NAME, "stream": True, **body})
        stream = answer.headers["x-stream-id"]
        last = ids(answer.content)[3]
        for url, headers, status in (
            (f"/v1/streams/{stream}", {"x-api-key": "kb"}, 404),
            (f"/v1/streams/{stream}", {"x-api-key": "kc"}, 401),
            ("/v1/streams/chatcmpl-0", {}, 404),
            (f"/v1/streams/{stream}", {"Last-Event-ID": "5"}, 400),
            (f"/v1/streams/{stream}", {"Last-Event-ID": f"{stream}:9.9"}, 400),
            (f"/v1/streams/{stream}", {"Last-Event-ID": "chatcmpl-0:1.1.0"}, 400),
            (f"/v1/streams/{stream}", {"Last-Event-ID": last}, 200),
        ):
            assert (await http.get(url, headers=headers)).status_code == status
        beyond = await http.get(f"/v1/streams/{stream}", headers={"Last-Event-ID": f"{stream}:1.999999999.0"})
        assert "it has fewer" in beyond.text, "who has what never was is told so"
        assert "[DONE]" not in beyond.text
        whole = await http.post(path, json={"model": NAME, **body})
        assert "x-stream-id" not in whole.headers
    async with keeping(tmp_path / "short", stream_grace=0) as (port, _), httpx.AsyncClient(base_url=port.url) as http:
        answer = await http.post(path, json={"model": NAME, "stream": True, **body})
        await asyncio.sleep(1.5)
        assert (await http.get(f"/v1/streams/{answer.headers['x-stream-id']}")).status_code == 404


async def test_events_have_no_ids_without_data_dir() -> None:
    async with serving(FakeEngine(hashed(LETTERS))) as port, httpx.AsyncClient(base_url=port.url) as http:
        answer = await http.post(
            CHAT, json={"model": NAME, "stream": True, **TEXT}, headers={"Last-Event-ID": "a:1.1.1"}
        )
        assert b"id: " not in answer.content
        keyed = await http.post(CHAT, json={"model": NAME, **TEXT, "colour": 1}, headers={"Idempotency-Key": "a"})
        assert keyed.headers["x-ignored-params"] == "colour, Idempotency-Key"
        assert (await http.get("/v1/streams/chatcmpl-0")).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_idempotency_key_returns_same_answer(stream: bool, tmp_path: Path) -> None:
    key = {"Idempotency-Key": "order 5"}
    body = {"model": NAME, **TEXT, "stream": stream}
    answers = []
    for _ in range(2):
        async with (
            keeping(tmp_path, api_key=["ka", "kb"]) as (port, engine),
            httpx.AsyncClient(base_url=port.url) as http,
        ):
            http.headers["x-api-key"] = "ka"
            answers += [await http.post(CHAT, json=body, headers=key) for _ in range(2)]
            assert len({each.seed for each in engine.seen}) <= 1
            assert not (stream and answers[2:] and engine.seen), "a stream that has ended is not computed again"
            other = await http.post(CHAT, json=body | {"max_tokens": 3}, headers=key)
            assert other.status_code == 422
            assert (await http.post(COMPLETIONS, json={"prompt": "a", "model": NAME}, headers=key)).status_code == 422
            foreign = await http.post(CHAT, json=body, headers=key | {"x-api-key": "kb"})
            assert foreign.content != answers[0].content, "a key of another caller"
            assert (await http.post(CHAT, json=body, headers={"Idempotency-Key": "k" * 300})).status_code == 400
    assert {each.status_code for each in answers} == {200}
    if stream:
        assert len({each.content for each in answers}) == 1
    else:
        assert len({json.dumps(each.json(), sort_keys=True) for each in answers}) == 1


async def test_idempotency_key_of_open_request_returns_409(tmp_path: Path) -> None:
    key = {"Idempotency-Key": "k"}
    slow = keeping(tmp_path, engine={"step_seconds": 0.02, "burst": 1})
    async with slow as (port, engine), httpx.AsyncClient(base_url=port.url, timeout=30) as http:
        body = {"model": NAME, **TEXT, "max_tokens": 60}
        first = asyncio.create_task(http.post(CHAT, json=body, headers=key))
        async with asyncio.timeout(20):
            while not engine.seen:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        busy = await http.post(CHAT, json=body, headers=key)
        assert (busy.status_code, busy.headers["retry-after"]) == (409, "1")
        assert (await http.post(CHAT, json=body, headers=key)).status_code == 409
        assert (await first).json() == (await http.post(CHAT, json=body, headers=key)).json()


async def test_rejected_request_releases_idempotency_key(tmp_path: Path) -> None:
    key = {"Idempotency-Key": "k"}
    async with keeping(tmp_path) as (port, _), httpx.AsyncClient(base_url=port.url, timeout=30) as http:
        many = {"model": NAME, "prompt": ["a"] * 2000, "n": 3, "max_tokens": 2}
        assert (await http.post(COMPLETIONS, json=many, headers=key)).status_code == 400
        assert (await http.post(COMPLETIONS, json=many | {"prompt": "a"}, headers=key)).status_code == 200
    async with open_http(tmp_path / "late", engine={"step_seconds": 0.05}) as (http, _):
        late = {"model": NAME, **TEXT, "timeout": 0.2}
        assert (await http.post(CHAT, json=late, headers=key)).status_code == 408
        assert (await http.post(CHAT, json=late | {"timeout": 60}, headers=key)).status_code == 200


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["chat", "two", "response", "message"])
async def test_stream_resumes_with_other_version_and_is_marked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an upgrade: the journal's tokens stay, and the others are the new engine's."""
    path, _, body = CALLS[name]
    async with keeping(tmp_path, engine={"step_seconds": 0.01, "burst": 1}, stream_grace=600) as (port, _):
        received = await read_stream(port.url, path, body, events=12)
    monkeypatch.setattr("quire.server.served_model.VERSION", "another")
    last = ids(received)[-1]
    stream = last.rpartition(":")[0]
    other_engine = FakeEngine(hashed(b"ABCDEFGH"), eos=[EOS], max_model_len=2048)
    options: dict[str, Any] = {"data_dir": tmp_path, "chat_template": HERMES, "reasoning_parser": "think"}
    async with serving(other_engine, **options) as port, httpx.AsyncClient(base_url=port.url) as http:
        answer = await http.get(f"/v1/streams/{stream}", headers={"Last-Event-ID": last})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-computed-by"].count("fp_") == 2, "it is marked"
        received += answer.content
        assert len(set(ids(received))) == len(ids(received))
        known = [len(each.emitted_ids) for each in other_engine.seen]
        whole = await http.get(f"/v1/streams/{stream}")
        assert whole.headers["x-computed-by"].count("fp_") == 2
        assert not other_engine.seen[len(known) :], "it has ended, and nothing of it is computed again"
    texts = [_text_by_choice(each) for each in (received, whole.content)]
    assert texts[0] == texts[1]
    for text, count in zip(texts[0].values(), known, strict=True):
        assert count > 0
        assert re.fullmatch(rb"[^A-H]+[A-H]+", text), text


def _text_by_choice(events: bytes) -> dict[bytes, bytes]:
    """Return the text of each choice."""
    texts: dict[bytes, bytes] = {}
    for event in events.split(b"\n\n"):
        if text := re.search(rb'"(?:content|delta|text)":"([^"]*)"', event):
            index = re.search(rb'"index":(\d)', event)
            choice = b"" if index is None else index[1]
            if b"event: response." not in event or b"text.delta" in event:
                texts[choice] = texts.get(choice, b"") + text[1]
    return texts


async def test_resume_with_logprobs_or_other_weights_returns_409(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = {}
    async with keeping(tmp_path) as (port, engine):
        for name in ("chat", "logprobs"):
            path, _, body = CALLS[name]
            last[name] = ids(await read_stream(port.url, path, body))[3]
        whole = {"model": NAME, **TEXT}
        key = {"Idempotency-Key": "k"}
        async with httpx.AsyncClient(base_url=port.url) as http:
            first_answer = (await http.post(CHAT, json=whole, headers=key)).json()
            probable = whole | {"logprobs": True}
            assert (await http.post(CHAT, json=probable, headers={"Idempotency-Key": "l"})).status_code == 200
    with monkeypatch.context() as upgraded:
        upgraded.setattr("quire.server.served_model.VERSION", "another")
        async with keeping(tmp_path) as (port, engine), httpx.AsyncClient(base_url=port.url) as http:
            again = await http.post(CHAT, json=whole, headers=key)
            assert again.json()["choices"] == first_answer["choices"], "its tokens are in the journal"
            for response in (
                await http.post(CHAT, json=probable, headers={"Idempotency-Key": "l"}),
                await http.post(CHAT, headers={"Last-Event-ID": last["logprobs"]}),
            ):
                assert response.status_code == 409, response.text
            assert not engine.seen
    monkeypatch.setattr("tests.server.fake.MODEL", "another")
    async with keeping(tmp_path) as (port, engine), httpx.AsyncClient(base_url=port.url) as http:
        answer = await http.post(CHAT, headers={"Last-Event-ID": last["chat"]})
        assert answer.status_code == 409, "other weights"
        assert not engine.seen


async def test_conversation_streams_and_deleted_responses_are_not_resumable(tmp_path: Path) -> None:
    async with keeping(tmp_path) as (port, _), httpx.AsyncClient(base_url=port.url, timeout=30) as http:
        talk = (await http.post("/v1/conversations", json={})).json()["id"]
        request = {"model": NAME, "input": "Hi", "conversation": talk, "stream": True, "max_output_tokens": 16}
        refused = await http.post("/v1/responses", json=request, headers={"Idempotency-Key": "k"})
        assert refused.status_code == 400
        answer = await http.post("/v1/responses", json=request)
        assert b"id: " not in answer.content, "the next time the conversation is another one"
        assert len((await http.get(f"/v1/conversations/{talk}/items")).json()["data"]) == 2
        del request["conversation"]
        stream = (await http.post("/v1/responses", json=request)).headers["x-stream-id"]
        assert (await http.delete(f"/v1/responses/{stream}")).status_code == 200
        assert (await http.get(f"/v1/streams/{stream}")).status_code == 404
        assert (await http.get(f"/v1/responses/{stream}")).status_code == 404


async def test_idempotency_key_starts_background_response_once(tmp_path: Path) -> None:
    key = {"Idempotency-Key": "k"}
    request = {"model": NAME, "input": "Hi", "background": True, "max_output_tokens": 40}
    async with open_http(tmp_path, engine={"step_seconds": 0.02, "burst": 1}) as (http, engine):
        id = (await http.post("/v1/responses", json=request, headers=key)).json()["id"]
        assert [(await http.get(f"/v1/streams/{id}")).status_code for _ in range(3)] == [400] * 3
        repeated_ids = [(await http.post("/v1/responses", json=request, headers=key)).json()["id"] for _ in range(2)]
        async with asyncio.timeout(30):
            while (now := (await http.get(f"/v1/responses/{id}")).json())["status"] in ("queued", "in_progress"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert now["status"] == "incomplete"
        again = (await http.post("/v1/responses", json=request, headers=key)).json()
        assert [*repeated_ids, again["id"]] == [id] * 3
        assert again["output"] == now["output"]
        assert len(engine.seen) == 1


async def test_keep_alive_seconds_continues_stream_without_reader(tmp_path: Path) -> None:
    path, _, body = CALLS["chat"]
    long_body = body | {"max_tokens": 60}
    slow = {"step_seconds": 0.01, "burst": 1}
    async with keeping(tmp_path, engine=slow) as (port, engine), httpx.AsyncClient(base_url=port.url) as http:
        received = await read_stream(port.url, path, long_body, events=4, **{"X-Keep-Alive-Seconds": "30"})
        async with asyncio.timeout(20):
            while engine.generated < 60:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        last = ids(received)[-1]
        received += await read_stream(port.url, f"/v1/streams/{last.rpartition(':')[0]}", **{"Last-Event-ID": last})
        assert len(engine.seen) == 1, "all of it was there"
        assert events_by_choice(received) == events_by_choice(
            await read_stream(port.url, f"/v1/streams/{last.rpartition(':')[0]}")
        )
        for headers, more in (
            ({"X-Keep-Alive-Seconds": "soon"}, {}),
            ({"X-Keep-Alive-Seconds": "601"}, {}),
            ({"X-Keep-Alive-Seconds": "5"}, {"stream": False}),
        ):
            answer = await http.post(path, json={"model": NAME, "stream": True, **body, **more}, headers=headers)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-keep-alive-seconds")
        await read_stream(port.url, path, long_body | {"max_tokens": 2000}, events=4, **{"X-Keep-Alive-Seconds": "0.1"})
        async with asyncio.timeout(20):
            while not engine.aborted:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert engine.generated < 60 + 2000
    async with serving(FakeEngine(hashed(LETTERS))) as port, httpx.AsyncClient(base_url=port.url) as http:
        answer = await http.post(
            path, json={"model": NAME, "stream": True, **body}, headers={"X-Keep-Alive-Seconds": "5"}
        )
        assert answer.status_code == 400


async def test_abandoned_streams_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.server.durability.background.MAX_ABANDONED", 2)
    path, _, body = CALLS["chat"]
    async with keeping(tmp_path, engine={"step_seconds": 0.01, "burst": 1}) as (port, engine):
        for _ in range(4):
            await read_stream(port.url, path, body | {"max_tokens": 1500}, events=3, **{"X-Keep-Alive-Seconds": "30"})
        async with asyncio.timeout(20):
            while len(engine.running) > 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert len(engine.aborted) == 2
