"""Anthropic's SDK and langchain-anthropic; every streamed event is validated against the SDK's types."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import pytest
from anthropic.types import CacheMissSystemChanged, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from anthropic.types.beta import BetaCacheMissPreviousMessageNotFound
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import TypeAdapter

from tests.clients.scripted import MODEL, call, scripted

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WEATHER: Any = {"name": "weather", "description": "The weather of a city", "input_schema": CITY}
HELLO: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
TURNS = ("<think>A tool knows.</think>Let me look." + call("weather", city="Rome"), "<think>Good.</think>It rains.")


@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather of a city."""
    return f"Rain in {city}"


def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


def validated_events(url: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, each validated."""
    lines = httpx.post(f"{url}/v1/messages", json={**body, "stream": True}, timeout=60).text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [EVENT.validate_json(each, strict=True) for each in data if '"ping"' not in each]


def test_anthropic_sdk_message_is_same_whole_and_streamed(server: Any) -> None:
    options: dict[str, Any] = {"model": "quire-demo", "max_tokens": 20, "messages": HELLO}
    seeded = {**options, "extra_body": {"temperature": 0, "ignore_eos": True}}
    whole = client(server.url).messages.create(**seeded)
    with client(server.url).messages.stream(**seeded) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].type == "text"
    assert whole.content[0].text == text
    assert (whole.stop_reason, final.stop_reason, final.usage.output_tokens) == ("max_tokens", "max_tokens", 20)
    counted = client(server.url).messages.count_tokens(model="quire-demo", messages=options["messages"])
    input_tokens = final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == input_tokens
    assert isinstance(counted, MessageTokensCount)
    assert validated_events(server.url, options)[0].type == "message_start"


def test_anthropic_sdk_reads_cache_diagnostics_whole_and_streamed(server: Any) -> None:
    options: dict[str, Any] = {"model": "quire-demo", "max_tokens": 4, "messages": HELLO, "system": "Monday. " * 20}
    first = client(server.url).messages.create(**options, diagnostics={"previous_message_id": None})
    assert first.diagnostics is None
    same: dict[str, Any] = {**options, "diagnostics": {"previous_message_id": first.id}}
    assert client(server.url).messages.create(**same).diagnostics is None
    changed = {**same, "system": "Tuesday. " * 20}
    reason = client(server.url).messages.create(**changed).diagnostics.cache_miss_reason
    assert isinstance(reason, CacheMissSystemChanged)
    assert reason.cache_missed_input_tokens > 0
    with client(server.url).messages.stream(**changed) as stream:
        assert stream.get_final_message().diagnostics.cache_miss_reason == reason
    assert validated_events(server.url, changed)[0].message.diagnostics.cache_miss_reason == reason
    unknown = {**options, "diagnostics": {"previous_message_id": "msg_unknown"}}
    beta = client(server.url).beta.messages.create(**unknown, betas=["cache-diagnosis-2026-04-07"])
    assert isinstance(beta.diagnostics.cache_miss_reason, BetaCacheMissPreviousMessageNotFound)


def test_anthropic_sdk_forced_tool_choice_returns_valid_tool_use(server: Any) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        answer = client(server.url).messages.create(
            model="quire-demo", max_tokens=200, messages=HELLO, tools=[WEATHER], tool_choice=choice
        )
        assert all(block.type == "tool_use" and block.input["city"] in ("Rome", "Oslo") for block in answer.content)


def test_anthropic_sdk_lists_models_and_raises_typed_errors(server: Any) -> None:
    (model,) = client(server.url).models.list().data
    ModelInfo.model_validate(model.model_dump(), strict=False)
    assert (model.id, model.max_input_tokens) == ("quire-demo", 2048)
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as missing:
        client(server.url).messages.create(model="x", max_tokens=1, messages=HELLO)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]"):
        client(server.url).messages.create(
            model="quire-demo", max_tokens=1, messages=[{"role": "user", "content": [{"type": "novel"}]}]
        )


def test_anthropic_sdk_thinking_tool_loop_hits_prefix_cache(tmp_path: Path) -> None:
    with scripted(tmp_path, *TURNS) as url:
        options: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": 2000,
            "tools": [WEATHER],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        events = validated_events(url, {**options, "messages": HELLO})
        assert len({event.type for event in events}) == 6
        with client(url).messages.stream(**options, messages=HELLO) as stream:
            event_types = [event.type for event in stream]
            first = stream.get_final_message()
        assert {"thinking", "text", "input_json"} <= set(event_types)
        thinking, text, use = first.content
        assert (thinking.type, text.type, use.type) == ("thinking", "text", "tool_use")
        assert (use.name, use.input, first.stop_reason) == ("weather", {"city": "Rome"}, "tool_use")
        whole = client(url).messages.create(**options, messages=HELLO)
        assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "Rain"}
        talk = [*HELLO, first.to_param(), {"role": "user", "content": [result]}]
        answer = client(url).messages.create(**options, messages=talk)
        assert answer.content[-1].text == "It rains."
        hits = answer.usage.cache_read_input_tokens or 0
        assert hits >= 0.9 * (hits + answer.usage.input_tokens), "the second turn's prompt was in the cache"


def test_langchain_anthropic_runs_tool_loop_whole_and_streamed(tmp_path: Path, server: Any) -> None:
    with scripted(tmp_path, *TURNS) as url:
        model = ChatAnthropic(model=MODEL, base_url=url, api_key="none", max_tokens=500).bind_tools([weather])
        question = HumanMessage("What is the weather in Rome?")
        answer = model.invoke([question])
        assert isinstance(answer, AIMessage)
        (tool_call,) = answer.tool_calls
        streamed = None
        for chunk in model.stream([question]):
            streamed = chunk if streamed is None else streamed + chunk
        assert streamed is not None
        assert streamed.tool_calls[0]["args"] == tool_call["args"] == {"city": "Rome"}
        result = ToolMessage(weather.invoke(tool_call["args"]), tool_call_id=tool_call["id"])
        final = model.invoke([question, answer, result])
        assert "It rains." in str(final.content)
        assert final.usage_metadata is not None
        assert final.usage_metadata["output_tokens"] > 0
    story = ChatAnthropic(model="quire-demo", base_url=server.url, api_key="none", max_tokens=9).invoke("Hi")
    assert isinstance(story.content, str)
