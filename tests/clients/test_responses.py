"""The Responses API of the OpenAI SDK, and openai-agents, which use it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    OpenAIResponsesWSModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from tests.clients.scripted import MODEL, call, scripted

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
TURNS = ("<think>A tool knows.</think>Let me look." + call("weather", city="Rome"), "<think>Good.</think>It rains.")


class Animal(BaseModel):
    name: Literal["fox", "crow"]


@function_tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather of a city."""
    return f"Rain in {city}"


def test_responses_sdk_text_is_same_whole_and_streamed_and_parses(url: str) -> None:
    client = OpenAI(base_url=url, api_key="none")
    options: dict[str, Any] = {"model": "quire-demo", "input": "A story, please.", "max_output_tokens": 12}
    whole = client.responses.create(**options, temperature=0)
    with client.responses.stream(**options, temperature=0) as stream:
        events = list(stream)
    streamed = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final = events[-1].response
    assert whole.output_text == streamed == final.output_text
    assert final.usage is not None
    assert final.usage.output_tokens <= 12
    parsed = client.responses.parse(model="quire-demo", input="Which animal?", text_format=Animal)
    assert isinstance(parsed.output_parsed, Animal)


def test_responses_sdk_required_tool_choice_returns_function_call(url: str) -> None:
    client = OpenAI(base_url=url, api_key="none")
    options: dict[str, Any] = {"model": "quire-demo", "input": "Rome?", "tools": [WEATHER], "tool_choice": "required"}
    answer = client.responses.create(**options, max_output_tokens=200, parallel_tool_calls=False)
    (item,) = answer.output
    assert item.type == "function_call"
    assert item.name == "weather"


def test_responses_sdk_tool_loop_hits_prefix_cache(tmp_path: Path) -> None:
    with scripted(tmp_path, *TURNS) as url, OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        talk: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
        options: dict[str, Any] = {
            "model": MODEL,
            "instructions": "Use tools. " * 20,
            "tools": [WEATHER],
            "store": False,
        }
        first = client.responses.create(**options, input=talk, include=["reasoning.encrypted_content"])
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        talk += [item.model_dump(exclude_none=True) for item in first.output]
        talk.append({"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "Rain"})
        second = client.responses.create(**options, input=talk)
        assert second.output_text == "It rains."
        usage = second.usage
        assert usage is not None
        assert usage.input_tokens_details.cached_tokens >= 0.9 * usage.input_tokens


def test_responses_sdk_websocket_continues_with_new_items_only(tmp_path: Path) -> None:
    with scripted(tmp_path, *TURNS) as url, OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        about: dict[str, Any] = {"model": MODEL, "tools": [WEATHER], "store": False, "stream_id": "main"}

        def wait_for_response(connection: Any) -> Any:
            for event in connection:
                assert event.stream_id == "main"
                if event.type == "response.completed":
                    return event.response
                assert event.type not in ("response.failed", "error"), event
            raise AssertionError("the connection was closed")

        with client.responses.connect() as connection:
            connection.response.create(**about, input="What is the weather in Rome?")
            first = wait_for_response(connection)
            result: Any = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "Rain"}
            connection.response.create(**about, input=[result], previous_response_id=first.id)
            second = wait_for_response(connection)
            assert second.output_text == "It rains."
            assert second.usage.input_tokens_details.cached_tokens >= 0.9 * second.usage.input_tokens - 10
            connection.response.create(model=MODEL, input="Hi", previous_response_id="resp_0")
            error = connection.recv()
            assert (error.type, error.error.code) == ("error", "previous_response_not_found")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("model_class", [OpenAIResponsesModel, OpenAIResponsesWSModel])
def test_openai_agents_run_tool_loop(tmp_path: Path, streamed: bool, model_class: type[OpenAIResponsesModel]) -> None:
    set_tracing_disabled(True)

    async def run(url: str) -> Any:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            model = model_class(model=MODEL, openai_client=client)
            agent = Agent(
                name="Forecaster",
                instructions="Say what the weather is.",
                model=model,
                tools=[weather],
                model_settings=ModelSettings(max_tokens=500),
            )
            if not streamed:
                return await Runner.run(agent, "What is the weather in Rome?")
            result = Runner.run_streamed(agent, "What is the weather in Rome?")
            kinds = [event.type async for event in result.stream_events()]
            assert {"raw_response_event", "run_item_stream_event"} <= set(kinds)
            return result

    with scripted(tmp_path, *TURNS) as url:
        result = asyncio.run(run(url))
    assert result.final_output == "It rains."
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert outputs == ["Rain in Rome"]
