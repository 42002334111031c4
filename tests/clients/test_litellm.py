"""litellm as a library: completions, streams, tools and errors."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest

MESSAGES = [{"role": "user", "content": "Tell me a story."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


@pytest.fixture(params=["openai/quire-demo", "hosted_vllm/quire-demo"])
def options(request: pytest.FixtureRequest, url: str, closing: dict[str, int]) -> dict[str, Any]:
    """For any OpenAI-compatible server, and for vLLM."""
    sampling = {"max_tokens": 60, "seed": 1, "logit_bias": closing}
    return {"model": request.param, "api_base": url, "api_key": "none", "num_retries": 0, **sampling}


def test_litellm_completion_is_same_whole_and_streamed(options: dict[str, Any]) -> None:
    whole = litellm.completion(messages=MESSAGES, **options | {"max_tokens": 12})
    stream = litellm.completion(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **options | {"max_tokens": 12}
    )
    chunks = list(stream)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert rebuilt.choices[0].message.content == whole.choices[0].message.content
    assert [reason for reason in reasons if reason] == [whole.choices[0].finish_reason] == ["length"]
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens == 12
    assert rebuilt.usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_required_tool_call_is_valid(options: dict[str, Any], stream: bool) -> None:
    tool_options = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "stream": stream}
    answer = litellm.completion(messages=MESSAGES, **tool_options, **options)
    answer = litellm.stream_chunk_builder(list(answer)) if stream else answer
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert calls[0].function.name == "weather"
    assert json.loads(calls[0].function.arguments)["city"] in ("Rome", "Oslo")


def test_litellm_response_format_follows_json_schema(options: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    answer = litellm.completion(messages=MESSAGES, response_format=form, **options)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Rome", "Oslo")


def test_litellm_raises_typed_errors(options: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=MESSAGES, **options, temperature=7)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "fox " * 5000}], **options)
    provider = options["model"].partition("/")[0]
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=MESSAGES, **options | {"model": f"{provider}/no-such-model"})
