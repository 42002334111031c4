"""huggingface_hub's InferenceClient: chat, tools, JSON, streams, and the list of models."""

from __future__ import annotations

import asyncio
import json

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient

MODEL = "quire-demo"
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": SCHEMA}}


@pytest.fixture
def client(url: str) -> InferenceClient:
    return InferenceClient(base_url=url, api_key="none")


def test_inference_client_chat_is_same_whole_and_streamed(client: InferenceClient) -> None:
    options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "seed": 2, "logprobs": True, "top_logprobs": 2}
    whole = client.chat_completion(**options)
    chunks = list(client.chat_completion(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
        whole.choices[0].message.content
    )
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len(whole.choices[0].logprobs.content) == 12
    assert all(len(token.top_logprobs) == 2 for token in whole.choices[0].logprobs.content)


@pytest.mark.parametrize("choice", ["required", {"function": {"name": "weather"}}])
def test_inference_client_forced_tool_choice_returns_tool_call(client: InferenceClient, choice: object) -> None:
    answer = client.chat_completion(model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice=choice, max_tokens=200)
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")


def test_inference_client_response_format_follows_json_schema(client: InferenceClient) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    answer = client.chat_completion(model=MODEL, messages=MESSAGES, response_format=form, max_tokens=60)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Rome", "Oslo")


async def _streamed(url: str) -> str:
    async with AsyncInferenceClient(base_url=url, api_key="none") as client:
        stream = await client.chat_completion(model=MODEL, messages=MESSAGES, max_tokens=12, seed=2, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def test_async_inference_client_streams_same_text(url: str, client: InferenceClient) -> None:
    whole = client.chat_completion(model=MODEL, messages=MESSAGES, max_tokens=12, seed=2)
    assert asyncio.run(_streamed(url)) == whole.choices[0].message.content
