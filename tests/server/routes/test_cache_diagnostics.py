"""Cache diagnostics in the forms of OpenAI and Anthropic: the diagnostics of conversations that change one thing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from quire.engine.common.types import EngineInfo
from tests.server import anthropic, openai_responses
from tests.server.api import NAME, Api, open_api
from tests.server.fake import FakeEngine, hashed
from tests.server.resolve.test_tool_requests import HERMES
from tests.server.routes import test_agents
from tests.server.routes.test_streams import keeping, read_stream
from tests.server.scripted import TEMPLATE, ScriptedEngine

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
BETA = {"anthropic-beta": "claude-code-20250219,cache-diagnosis-2026-04-07"}
WEATHER = {"name": "weather", "description": "d", "input_schema": {"type": "object"}}
MARK = {"cache_control": {"type": "ephemeral"}}
LONG = "Answer in the manner of a fox who has read many books. " * 3
THINKING = "{# enable_thinking #}{% if enable_thinking is true %}Think, fox, think for long!{% endif %}" + HERMES


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def message_body(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "max_tokens": 3, "system": LONG, "tools": [WEATHER], "messages": [user(LONG)], **fields}


def response_body(**fields: Any) -> dict[str, Any]:
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    return {"model": NAME, "max_output_tokens": 3, "instructions": LONG, "tools": [tool], "input": LONG, **fields}


def opened(**options: Any) -> Any:
    engine = FakeEngine(hashed(b"abc "), max_model_len=4096)
    return open_api(engine, **{"chat_template": HERMES, **options})


async def begin(api: Api, **fields: Any) -> Any:
    """Return a first message, which opts in."""
    first = await api.post(MESSAGES, message_body(diagnostics={"previous_message_id": None}, **fields))
    assert first["diagnostics"] is None
    return first


async def message_reason(api: Api, previous: str, **fields: Any) -> Any:
    body = message_body(**fields, diagnostics={"previous_message_id": previous})
    diagnostics = (await api.post(MESSAGES, body))["diagnostics"]
    assert diagnostics is None or diagnostics.keys() == {"cache_miss_reason"}
    return None if diagnostics is None else diagnostics["cache_miss_reason"]


async def diagnose(api: Api, compared: str, **fields: Any) -> Any:
    """Return a response's diagnostics; the SDK's type checks the response."""
    body = response_body(**fields, prompt_cache_options={"comparison_response_id": compared})
    answer = await api.post(RESPONSES, body)
    openai_responses.RESPONSE.validate_python(answer, strict=True)
    return answer["prompt_cache_diagnostics"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"messages": [user(LONG), {"role": "assistant", "content": "So?"}, user("On.")]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": LONG, **MARK}]}]}, None),
        ({"system": [{"type": "text", "text": LONG, **MARK}], "tools": [{**WEATHER, **MARK}]}, None),
        ({"max_tokens": 2, "temperature": 0.5, "tool_choice": {"type": "auto"}}, None),
        ({"model": "second"}, None),  # the same model by its other name
        ({"system": f"It is noon. {LONG}"}, "system_changed"),
        ({"system": f"It is noon. {LONG}", "messages": [user("On.")]}, "system_changed"),
        ({"tools": [{**WEATHER, "name": "clock"}]}, "tools_changed"),
        ({"tools": []}, "tools_changed"),
        ({"tools": [{**WEATHER, "name": "clock"}], "system": "Hi"}, "tools_changed"),
        ({"messages": [user(f"No: {LONG}")]}, "messages_changed"),
        ({"messages": [user("On."), user(LONG)]}, "messages_changed"),
        ({"tool_choice": {"type": "none"}}, "unavailable"),  # the template shows no tools
    ],
)
async def test_message_diagnostics_name_what_changed(fields: dict[str, Any], reason: str | None) -> None:
    async with opened() as api:
        first = await begin(api)
        diagnosis = await message_reason(api, first["id"], **fields)
        assert (diagnosis and diagnosis["type"]) == reason
        if reason is not None and reason != "unavailable":
            before, after = (len(each.prompt_ids) for each in api.engine.seen)
            assert 0 < diagnosis.pop("cache_missed_input_tokens") <= min(before, after)
        assert (diagnosis or {}).keys() <= {"type"}


async def test_message_diagnostics_are_unavailable_when_other_prompt_settings_change() -> None:
    async with opened(chat_template=THINKING) as api:
        first = await begin(api)
        diagnosis = await message_reason(api, first["id"], thinking={"type": "enabled", "budget_tokens": 1024})
        assert diagnosis == {"type": "unavailable"}


async def test_message_diagnostics_skip_billing_header_of_agents() -> None:
    async with opened() as api:
        first = await begin(api, system=f"x-anthropic-billing-header: one\n{LONG}")
        assert await message_reason(api, first["id"], system=f"x-anthropic-billing-header: two\n{LONG}") is None


async def test_messages_without_opt_in_are_not_found() -> None:
    async with opened() as api:
        plain = await api.post(MESSAGES, message_body())
        assert plain["diagnostics"] is None
        response = await api.post(RESPONSES, response_body())
        for unknown in (plain["id"], response["id"], "msg_unknown", "x", "", "ü"):
            reason = await message_reason(api, unknown)
            assert reason == ({"type": "previous_message_not_found"} if unknown else None)
        null = await api.post(MESSAGES, message_body(diagnostics=None))
        assert await message_reason(api, null["id"]) == {"type": "previous_message_not_found"}


async def test_streamed_message_starts_with_diagnostics_of_whole_message() -> None:
    async with opened() as api:
        first = await begin(api)
        body = message_body(system="Hi" * 20, seed=7, diagnostics={"previous_message_id": first["id"]})
        whole = await api.post(MESSAGES, body)
        streamed = await api.http.post(MESSAGES, json={**body, "stream": True}, headers=BETA)
        events = anthropic.named_events(streamed.text)
        assert events[0]["type"] == "message_start"
        assert events[0]["message"]["diagnostics"] == whole["diagnostics"]
        assert whole["diagnostics"]["cache_miss_reason"]["type"] == "system_changed"
        assert anthropic.without_ids(anthropic.folded(events)) == anthropic.without_ids(whole)
        assert await message_reason(api, events[0]["message"]["id"], system="Hi" * 20) is None, "a stream is remembered"


async def test_weight_update_changes_model() -> None:
    async with opened() as api:
        first = await begin(api)
        response = await api.post(RESPONSES, response_body())
        await api.post("/update_weights", {"path": "/"})
        reason = await message_reason(api, first["id"])
        assert reason == {
            "type": "model_changed",
            "cache_missed_input_tokens": len(api.engine.seen[0].prompt_ids) // 16 * 16,
        }
        assert (await diagnose(api, response["id"]))["reason"] == "model_changed"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"input": [user(LONG), {"role": "assistant", "content": "So?"}, user("On.")]}, None),
        ({"max_output_tokens": 2, "top_p": 0.5, "prompt_cache_key": "key"}, None),
        ({"text": {"verbosity": "low"}}, None),  # not in the prompt
        ({"tools": []}, "tools_changed"),
        ({"tools": [], "input": "Hi"}, "tools_changed"),
        ({"instructions": f"It is noon. {LONG}"}, "input_changed"),
        ({"input": f"No: {LONG}"}, "input_changed"),
        ({"tool_choice": "none"}, "unavailable"),
    ],
)
async def test_response_diagnostics_name_what_changed(fields: dict[str, Any], reason: str | None) -> None:
    async with opened() as api:
        first = await api.post(RESPONSES, response_body())
        assert "prompt_cache_diagnostics" not in first
        diagnosis = await diagnose(api, first["id"], **fields)
        if reason is None or reason == "unavailable":
            assert diagnosis == {"type": reason or "cache_hit"}
            return
        before = len(api.engine.seen[0].prompt_ids)
        assert diagnosis == {
            "type": "cache_miss",
            "reason": reason,
            "comparison_reusable_tokens": before // 16 * 16,
            "cache_missed_tokens": diagnosis["cache_missed_tokens"],
        }
        assert 0 < diagnosis["cache_missed_tokens"] <= before


async def test_response_diagnostics_name_changed_reasoning_effort() -> None:
    async with opened(chat_template=THINKING) as api:
        first = await api.post(RESPONSES, response_body(reasoning={"effort": "none"}))
        assert (await diagnose(api, first["id"], reasoning={"effort": "high"}))["reason"] == "reasoning_effort_changed"


async def test_responses_not_found_are_no_error() -> None:
    async with opened() as api:
        message = await begin(api)
        for unknown in (message["id"], "resp_unknown", "x"):
            assert await diagnose(api, unknown) == {"type": "comparison_response_not_found"}
        null = response_body(prompt_cache_options={"comparison_response_id": None, "mode": "implicit"})
        answer = await api.http.post(RESPONSES, json=null)
        assert "prompt_cache_diagnostics" not in answer.json()
        assert "x-ignored-params" not in answer.headers
        others = {"mode": "explicit", "ttl": "30m", "prewarm": True}
        answer = await api.http.post(RESPONSES, json=response_body(prompt_cache_options=others))
        assert answer.headers["x-ignored-params"] == ", ".join(f"prompt_cache_options.{name}" for name in others)


async def test_streamed_response_ends_with_diagnostics_of_whole_response() -> None:
    async with opened() as api:
        first = await api.post(RESPONSES, response_body())
        body = response_body(input="Hi" * 20, prompt_cache_options={"comparison_response_id": first["id"]})
        whole = await api.post(RESPONSES, body)
        streamed = await api.http.post(RESPONSES, json={**body, "stream": True})
        last = openai_responses.folded(openai_responses.events_of(streamed.text))
        assert last["prompt_cache_diagnostics"] == whole["prompt_cache_diagnostics"]
        assert whole["prompt_cache_diagnostics"]["reason"] == "input_changed"


async def test_stored_responses_are_compared_by_chain_and_keep_their_diagnostics(tmp_path: Path) -> None:
    async with opened(data_dir=tmp_path) as api:
        first = await api.post(RESPONSES, response_body())
        compared = {"comparison_response_id": first["id"]}
        next_turn = response_body(input="On.", previous_response_id=first["id"], prompt_cache_options=compared)
        second = await api.post(RESPONSES, next_turn)
        assert second["prompt_cache_diagnostics"] == {"type": "cache_hit"}
        stored = (await api.http.get(f"{RESPONSES}/{second['id']}")).json()
        assert stored == second
        unstored = await api.post(RESPONSES, {**next_turn, "store": False, "instructions": "Hi"})
        assert unstored["prompt_cache_diagnostics"]["reason"] == "input_changed"
        assert (await diagnose(api, unstored["id"], instructions="Hi" * 9))["type"] == "cache_miss"
        queued = await api.post(RESPONSES, {**next_turn, "background": True})
        assert queued["prompt_cache_diagnostics"] == {"type": "cache_hit"}


async def test_answers_of_other_keys_and_salts_are_not_found() -> None:
    async with opened(api_key=["one", "two"]) as api:
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        opt_in = message_body(diagnostics={"previous_message_id": None})
        first = (await api.http.post(MESSAGES, json=opt_in, headers={**one, "X-Request-Id": "same"})).json()
        assert first["id"] == "msg_same"
        same = message_body(diagnostics={"previous_message_id": first["id"]})
        for headers, fields, reason in (
            (one, {}, None),
            (two, {}, "previous_message_not_found"),
            (one, {"cache_salt": "salt"}, "previous_message_not_found"),
        ):
            answer = (await api.http.post(MESSAGES, json={**same, **fields}, headers=headers)).json()
            assert (answer["diagnostics"] and answer["diagnostics"]["cache_miss_reason"]["type"]) == reason
        response = (await api.http.post(RESPONSES, json=response_body(), headers=one)).json()
        compared = response_body(prompt_cache_options={"comparison_response_id": response["id"]})
        answer = (await api.http.post(RESPONSES, json=compared, headers=two)).json()
        assert answer["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}


async def agent_turn(api: Api, path: str, sent: dict[str, Any], previous: str | None) -> tuple[str, Any]:
    """Return the answer's id, and its diagnostics."""
    if path.startswith(MESSAGES):
        compared = {**sent, "diagnostics": {"previous_message_id": previous}}
        answer = await api.http.post(path, json=compared, headers=BETA)
        message = anthropic.folded(anthropic.named_events(answer.text))
        return message["id"], message["diagnostics"]
    answer = await api.http.post(path, json={**sent, "prompt_cache_options": {"comparison_response_id": previous}})
    response = openai_responses.folded(openai_responses.events_of(answer.text))
    return response["id"], response.get("prompt_cache_diagnostics")


@pytest.mark.parametrize("agent", ["claude_code", "codex"])
async def test_recorded_agents_change_nothing_until_tool_is_dropped(agent: str) -> None:
    recorded = test_agents.record(agent)
    turns = [(request["path"], test_agents.body(recorded, request)) for request in recorded["requests"]]
    turns = [(path, {**sent, "model": NAME}) for path, sent in turns if sent.get("tools")]
    async with open_api(ScriptedEngine(["Yes."] * 9), chat_template=TEMPLATE, tool_call_parser="hermes") as api:
        previous, diagnostics = await agent_turn(api, *turns[0], None)
        assert diagnostics is None
        for turn in turns[1:]:
            previous, diagnostics = await agent_turn(api, *turn, previous)
            assert diagnostics in (None, {"type": "cache_hit"})
        path, sent = turns[-1]
        _, diagnostics = await agent_turn(api, path, {**sent, "tools": sent["tools"][1:]}, previous)
        assert "tools_changed" in json.dumps(diagnostics)


class UncachedEngine(FakeEngine):
    async def start(self) -> EngineInfo:
        return msgspec.structs.replace(await super().start(), caches_prefixes=False)


async def test_diagnostics_are_unavailable_without_prefix_cache() -> None:
    async with open_api(UncachedEngine(hashed(b"abc"), max_model_len=4096), chat_template=HERMES) as api:
        first = await begin(api)
        assert await message_reason(api, first["id"]) == {"type": "unavailable"}
        assert await diagnose(api, "resp_x") == {"type": "unavailable"}


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (MESSAGES, {"diagnostics": {"previous_message_id": 1}}, "diagnostics.previous_message_id"),
        (MESSAGES, {"diagnostics": {"previous_message_id": "x" * 257}}, "diagnostics.previous_message_id"),
        (MESSAGES, {"diagnostics": {"previous_message_id": "\ud800"}}, "diagnostics.previous_message_id"),
        (MESSAGES, {"diagnostics": "msg_x"}, "diagnostics"),
        (
            RESPONSES,
            {"prompt_cache_options": {"comparison_response_id": []}},
            "prompt_cache_options.comparison_response_id",
        ),
        (
            RESPONSES,
            {"prompt_cache_options": {"comparison_response_id": "\ud800"}},
            "prompt_cache_options.comparison_response_id",
        ),
        (RESPONSES, {"prompt_cache_options": {"mode": "never"}}, "prompt_cache_options.mode"),
        (RESPONSES, {"prompt_cache_options": 1}, "prompt_cache_options"),
    ],
)
async def test_malformed_diagnostics_are_rejected(idle_api: Api, path: str, fields: dict[str, Any], named: str) -> None:
    body = message_body(**fields) if path == MESSAGES else response_body(**fields)
    answer = await idle_api.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(named)
    assert path == MESSAGES or named.startswith(error["param"])


async def test_counting_tokens_compares_nothing(api: Api) -> None:
    body = {name: value for name, value in message_body().items() if name != "max_tokens"}
    counted = await api.post("/v1/messages/count_tokens", {**body, "diagnostics": {"previous_message_id": "msg_x"}})
    assert counted == await api.post("/v1/messages/count_tokens", body)
    compared = response_body(prompt_cache_options={"comparison_response_id": "resp_x"})
    answer = await api.http.post("/v1/responses/input_tokens", json=compared)
    assert answer.json().keys() == {"object", "input_tokens"}


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_resumed_stream_repeats_diagnostics_after_restart(tmp_path: Path, path: str) -> None:
    """The next process does not know the earlier answer; the journal has its diagnostics."""
    first_body = message_body(diagnostics={"previous_message_id": None}) if path == MESSAGES else response_body()
    async with keeping(tmp_path) as (port, _), httpx.AsyncClient(base_url=port.url, timeout=30) as http:
        first = (await http.post(path, json=first_body)).json()["id"]
        if path == MESSAGES:
            body = message_body(system="Hi" * 20, diagnostics={"previous_message_id": first})
        else:
            body = response_body(instructions="Hi" * 20, prompt_cache_options={"comparison_response_id": first})
        key = {"Idempotency-Key": "once"}
        streamed = await read_stream(port.url, path, body, **key)
        assert b"_changed" in streamed
    async with keeping(tmp_path) as (port, _):
        assert await read_stream(port.url, path, body, **key) == streamed
