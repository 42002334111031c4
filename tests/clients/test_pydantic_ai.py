"""pydantic-ai agents: typed output by tool, natively and streamed, and a tool call."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, RunContext, Tool, ToolOutput
from pydantic_ai.messages import ModelResponse, ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition


class Animal(BaseModel, extra="forbid"):
    name: Literal["fox", "crow"]
    legs: int = Field(ge=2, le=4)


@pytest.fixture
def model(url: str) -> OpenAIChatModel:
    settings = ModelSettings(max_tokens=200, seed=4)
    return OpenAIChatModel("quire-demo", provider=OpenAIProvider(base_url=url, api_key="none"), settings=settings)


@pytest.mark.parametrize("output", [ToolOutput(Animal), NativeOutput(Animal)], ids=["tool", "native"])
def test_pydantic_ai_output_is_typed_by_tool_and_natively(
    model: OpenAIChatModel, output: ToolOutput[Animal] | NativeOutput[Animal]
) -> None:
    result = Agent(model, output_type=output).run_sync("Which animal?")
    assert isinstance(result.output, Animal)
    assert result.usage.output_tokens > 0


def test_pydantic_ai_streams_typed_output(model: OpenAIChatModel) -> None:
    async def ask() -> list[Animal]:
        agent = Agent(model, output_type=NativeOutput(Animal))
        async with agent.run_stream("Which animal?") as stream:
            return [part async for part in stream.stream_output(debounce_by=None)]

    assert isinstance(asyncio.run(ask())[-1], Animal)


def test_pydantic_ai_streamed_text_equals_whole_text(model: OpenAIChatModel) -> None:
    async def ask() -> str:
        async with Agent(model).run_stream("A story, please.", model_settings={"max_tokens": 12}) as stream:
            return "".join([part async for part in stream.stream_text(delta=True, debounce_by=None)])

    whole = Agent(model).run_sync("A story, please.", model_settings={"max_tokens": 12})
    assert asyncio.run(ask()) == whole.output


def test_pydantic_ai_agent_calls_tool_and_then_answers(model: OpenAIChatModel) -> None:
    """The model must call something: the tool or the output. The tool exists in the first step only."""

    async def at_first(context: RunContext[None], definition: ToolDefinition) -> ToolDefinition | None:
        return definition if context.run_step == 1 else None

    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """The weather of a city."""
        return f"Rain in {city}"

    agent = Agent(model, output_type=ToolOutput(Animal), tools=[Tool(weather, prepare=at_first)])
    called = set()
    for seed in range(3):
        result = agent.run_sync("Rome?", model_settings={"seed": seed, "parallel_tool_calls": False})
        assert isinstance(result.output, Animal)
        for message in result.all_messages():
            if isinstance(message, ModelResponse):
                called |= {part.tool_name for part in message.parts if isinstance(part, ToolCallPart)}
    assert called == {"weather", "final_result"}
