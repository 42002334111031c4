"""Ollama's API on scripted answers: requests that its clients send, and responses that they read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.api import NAME, Api, open_api
from tests.server.fake import FakeEngine, hashed, scripted
from tests.server.formats.test_tools import TWO_CALLS
from tests.server.resolve.test_tool_requests import EXPECTED, TOOLS, prompt, speaker
from tests.tiers import examples

CHAT, GENERATE = "/api/chat", "/api/generate"
HELLO: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}]}
TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


async def lines(api: Api, path: str, body: dict[str, Any]) -> list[Any]:
    response = await api.http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def assemble_stream(streamed: list[Any]) -> dict[str, Any]:
    """Assemble a stream as a client does: the last line, with all text, thinking and calls before it."""
    whole: dict[str, Any] = dict(streamed[-1])
    assert [line["done"] for line in streamed] == [False] * (len(streamed) - 1) + [True]
    key = "message" if "message" in whole else "response"
    parts = [line["message"] if key == "message" else line for line in streamed]
    text = "".join(one["content" if key == "message" else "response"] for one in parts)
    into = whole["message"] = {"role": "assistant", "content": text} if key == "message" else text
    if key == "response":
        into, whole["response"] = whole, whole.pop("message")
    if thinking := "".join(one.get("thinking", "") for one in parts):
        into["thinking"] = thinking
    if calls := [call for one in parts for call in one.get("tool_calls", [])]:
        into["tool_calls"] = calls
    return whole


def without_varying_fields(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer without the fields that differ from answer to answer."""
    for call in (answer.get("message") or answer).get("tool_calls", []) if "message" in answer else []:
        del call["id"]
    return {name: value for name, value in answer.items() if name not in (*TIMES, "created_at")}


async def test_ollama_chat_has_thinking_and_calls_whole_and_streamed() -> None:
    text = f"<think>Hm.</think>Let me see.\n{TWO_CALLS['hermes']}"
    async with speaker(text, reasoning_parser="think") as api:
        body = {**HELLO, "tools": TOOLS, "think": True}
        whole = await api.post(CHAT, {**body, "stream": False})
        streamed = await lines(api, CHAT, body)
    message = whole["message"]
    assert (message["role"], message["content"], message["thinking"]) == ("assistant", "Let me see.", "Hm.")
    assert [(one["function"]["name"], one["function"]["arguments"]) for one in message["tool_calls"]] == [
        (name, json.loads(arguments)) for name, arguments in EXPECTED
    ]
    assert (whole["model"], whole["done"], whole["done_reason"]) == (NAME, True, "stop")
    assert all(isinstance(whole[name], int) for name in (*TIMES, "prompt_eval_count", "eval_count"))
    assert len(streamed) > 5
    assert without_varying_fields(assemble_stream(streamed)) == without_varying_fields(whole)


async def test_durations_sum_to_total_whole_and_streamed() -> None:
    async with open_api(FakeEngine(hashed(b"ab"), step_seconds=0.005)) as api:
        body = {**HELLO, "options": {"num_predict": 20}}
        for response in (await api.post(CHAT, {**body, "stream": False}), (await lines(api, CHAT, body))[-1]):
            total, _, prompt, answer = (response[name] for name in TIMES)
            assert prompt + answer == total
            assert min(prompt, answer) > 0


@settings(deadline=None, max_examples=examples(15))
@given(st.text("ab é<", max_size=30), st.integers(1, 40), st.integers(1, 5))
async def test_streamed_ollama_answer_assembles_to_whole_answer(text: str, most: int, burst: int) -> None:
    engine = FakeEngine(scripted(text.encode(), 258), eos=[258], burst=burst, max_model_len=256)
    async with open_api(engine) as api:
        for path, body in ((CHAT, HELLO), (GENERATE, {"model": NAME, "prompt": "Hello"})):
            body = {**body, "options": {"num_predict": most}}
            assert without_varying_fields(assemble_stream(await lines(api, path, body))) == without_varying_fields(
                await api.post(path, {**body, "stream": False})
            )


async def test_ollama_options_and_format_reach_engine() -> None:
    async with open_api(FakeEngine(hashed(b"abc "), max_model_len=512)) as api:
        options = {
            "num_predict": 7,
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.9,
            "min_p": 0.1,
            "typical_p": 0.7,
            "seed": 4,
            "stop": ["q"],
        }
        options |= {"xtc_probability": 0.5, "dry_allowed_length": 3}
        options |= {"repeat_penalty": 1.5, "presence_penalty": 0.2, "frequency_penalty": 0.3, "num_ctx": 9000}
        response = await api.http.post(CHAT, json={**HELLO, "options": options, "keep_alive": "5m"})
        assert response.headers["x-ignored-params"] == "options.num_ctx"
        params = api.engine.seen[-1].params
        assert (params.max_tokens, params.temperature, params.top_k, params.stop) == (7, 0.5, 3, ("q",))
        assert (params.top_p, params.min_p, params.repetition_penalty, params.typical_p) == (0.9, 0.1, 1.5, 0.7)
        assert (params.xtc_probability, params.dry_allowed_length) == (0.5, 3)
        assert (params.presence_penalty, params.frequency_penalty) == (0.2, 0.3)
        assert api.engine.seen[-1].seed == 4
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        for form in ("json", schema):
            await api.http.post(
                GENERATE, json={"model": NAME, "prompt": "a", "format": form, "options": {"num_predict": 3}}
            )
            assert api.engine.seen[-1].params.grammar is not None
        await api.http.post(GENERATE, json={"model": NAME, "prompt": "a", "options": {"num_predict": -1}})
        assert api.engine.seen[-1].params.max_tokens is None


async def test_generate_applies_template_unless_raw() -> None:
    async with speaker("x") as api:
        await lines(api, GENERATE, {"model": f"{NAME}:latest", "prompt": "Hello", "system": "Be brief."})
        assert prompt(api).startswith("system\nBe brief.")
        assert "user\nHello" in prompt(api)
        await lines(api, GENERATE, {"model": NAME, "prompt": "Hello", "raw": True})
        assert prompt(api).endswith("Hello")
        assert "user" not in prompt(api)


async def test_tool_results_without_ids_match_calls_in_order() -> None:
    calls = [{"function": {"name": name, "arguments": json.loads(arguments)}} for name, arguments in EXPECTED]
    turns = [
        *HELLO["messages"],
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "20 degrees", "tool_name": EXPECTED[0][0]},
        {"role": "tool", "content": "12:00", "tool_name": EXPECTED[1][0]},
    ]
    async with speaker("Fine.") as api:
        answer = await api.post(CHAT, {"model": NAME, "messages": turns, "tools": TOOLS, "stream": False})
        assert answer["message"]["content"] == "Fine."
        assert prompt(api).index("20 degrees") < prompt(api).index("12:00")


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (CHAT, {"model": "nope", "messages": HELLO["messages"]}, 404, "does not exist"),
        (CHAT, {**HELLO, "options": {"temperature": -1}}, 400, "options.temperature"),
        (CHAT, {**HELLO, "options": {"num_predict": 0}}, 400, "options.num_predict"),
        (CHAT, {**HELLO, "options": 5}, 400, "options: Input should be an object"),
        (CHAT, {**HELLO, "format": {"type": "strange"}}, 400, "format: "),
        (CHAT, {"model": NAME, "messages": [{"role": "user", "content": "a", "images": ["x"]}]}, 400, "images"),
        (GENERATE, {"model": NAME, "prompt": "a", "template": "{{ .Prompt }}"}, 400, "template"),
        (GENERATE, {"model": NAME, "prompt": "a" * 3000}, 400, "prompt came to"),
        (GENERATE, {"model": NAME, "prompt": 3}, 400, "prompt"),
    ],
)
async def test_ollama_error_body_is_single_message(path: str, body: dict[str, Any], status: int, says: str) -> None:
    async with speaker("x") as api:
        error = await api.post(path, body, status)
    assert error.keys() == {"error"}
    assert says in error["error"]


async def test_empty_request_loads_model_and_tags_list_models() -> None:
    async with speaker("x") as api:
        for path, body in ((CHAT, {"model": NAME, "messages": []}), (GENERATE, {"model": NAME, "keep_alive": 0})):
            answer = await api.post(path, body)
            assert (answer["done"], answer["done_reason"]) == (True, "load")
        assert not api.engine.seen
        for path in ("/api/tags", "/api/ps"):
            (first, second) = (await api.http.get(path)).json()["models"]
            assert (first["name"], second["model"]) == (NAME, "second")
            assert (first["details"]["family"], first["details"]["format"]) == ("llama", "safetensors")
        assert (await api.http.get("/api/version")).json()["version"]
        details = await api.post("/api/show", {"model": NAME})
        assert details["capabilities"] == ["completion", "tools"]
        assert details["model_info"]["general.architecture"] == "llama"
        assert details["model_info"]["llama.context_length"] == 2048
        assert details["details"]["families"] == ["llama"]
        await api.post("/api/show", {"model": "nope"}, 404)
