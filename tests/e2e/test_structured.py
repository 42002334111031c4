"""Structured outputs of a real server through the OpenAI SDK: streamed, whole, and after an engine kill."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.server import Server

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 999},
            "minItems": 25,
            "maxItems": 30,
        },
        "kind": {"enum": ["fox", "king"]},
    },
    "required": ["name", "numbers", "kind"],
    "additionalProperties": False,
}
ASKED: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "story", "schema": SCHEMA, "strict": True}},
    "temperature": 1.0,
    "max_tokens": 400,
    "seed": 7,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("structured") / "log"
    started = Server(log, "--served-model-name", "demo", "--num-kv-blocks", "600", "--threads", "1")
    yield started
    started.stop()


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


def stream_choices(client: openai.OpenAI, kill: Server | None = None, **more: Any) -> dict[int, tuple[str, str | None]]:
    """Text and finish reason of each choice. The engine of `kill` is killed after some chunks."""
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    for number, chunk in enumerate(client.chat.completions.create(stream=True, **ASKED, **more)):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
        if number == 12 and kill is not None:
            engine = kill.engine_pid()
            assert engine is not None
            os.kill(engine, signal.SIGKILL)
    return {index: (text, reasons[index]) for index, text in texts.items()}


def test_json_schema_answers_are_same_streamed_whole_and_after_kill(client: openai.OpenAI, server: Server) -> None:
    whole = client.chat.completions.create(n=2, **ASKED)
    answers = {choice.index: (choice.message.content or "", choice.finish_reason) for choice in whole.choices}
    for text, reason in answers.values():
        assert reason == "stop"
        jsonschema.validate(json.loads(text), SCHEMA)
    assert answers[0] != answers[1]
    assert stream_choices(client, n=2) == answers
    assert stream_choices(client, n=2, kill=server) == answers


class Story(BaseModel, extra="forbid"):
    hero: Literal["fox", "king"]
    chapters: int = Field(ge=1, le=9)


def test_openai_sdk_parses_answer_into_pydantic_model(client: openai.OpenAI) -> None:
    options = ASKED | {"response_format": Story}
    whole = client.chat.completions.parse(**options).choices[0].message.parsed
    assert isinstance(whole, Story)
    with client.chat.completions.stream(**options) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == whole


def test_invalid_json_schema_is_rejected_with_400(client: openai.OpenAI) -> None:
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "required": 3}}}
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**ASKED | {"response_format": wrong})
    assert raised.value.param == "response_format"
