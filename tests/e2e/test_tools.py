"""Required tool calls of the embedded model, which was not trained on tools: the grammar forces them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

from tests.e2e.server import Server

pytestmark = pytest.mark.slow

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
MUST: list[Any] = ["required", {"type": "function", "function": {"name": "weather"}}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    log: Path = tmp_path_factory.mktemp("server") / "log"
    with Server(log, "--tool-call-parser", "hermes", "--threads", "1") as server:
        yield OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("choice", MUST, ids=["required", "named"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_required_tool_call_is_valid_whole_and_streamed(client: OpenAI, choice: Any, temperature: float) -> None:
    options: dict[str, Any] = {
        **{"model": "quire-demo", "messages": [{"role": "user", "content": "Hello"}], "seed": 1, "max_tokens": 200},
        **{"tools": TOOLS, "tool_choice": choice, "temperature": temperature, "parallel_tool_calls": False},
    }
    whole = client.chat.completions.create(**options).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    (call,) = whole.message.tool_calls or []
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Rome", "Oslo")
    assert arguments["days"] in range(1, 10)
    with client.chat.completions.stream(**options) as stream:
        streamed = stream.get_final_completion().choices[0]
    (same,) = streamed.message.tool_calls or []
    assert (same.function.name, same.function.arguments) == ("weather", call.function.arguments)
    assert streamed.finish_reason == "tool_calls"


class Weather(BaseModel):
    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


def test_openai_sdk_parses_tool_call_into_pydantic_model(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="quire-demo",
        messages=[{"role": "user", "content": "Hello"}],
        tools=[pydantic_function_tool(Weather)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)


def test_tool_call_cut_by_max_tokens_finishes_with_length(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="quire-demo",
        messages=[{"role": "user", "content": "Hi"}],
        tools=TOOLS,
        tool_choice="required",
        max_tokens=3,
    )
    assert answer.choices[0].finish_reason == "length"
