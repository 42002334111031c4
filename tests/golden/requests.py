"""Requests for both trees: seeded chats over all APIs, bad requests, and coding agents' requests."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

AGENTS = Path(__file__).parents[1] / "server" / "agents"
MODEL = "golden"
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_FUNCTION = {
    "name": "remember",
    "description": "Remembers something.",
    "parameters": {
        "type": "object",
        "properties": {"what": {"type": "string", "maxLength": 20}, "times": {"type": "integer"}},
        "required": ["what", "times"],
        "additionalProperties": False,
    },
}
_TALK = [{"role": "user", "content": "Tell me of a fox."}]
_LONG_TALK = [
    {"role": "system", "content": "You tell stories."},
    {"role": "user", "content": "Who lives by the brook?"},
    {"role": "assistant", "content": "An old bear."},
    {"role": "user", "content": "And then?"},
]
Request = tuple[str, dict[str, Any]]
"""A path and a body."""

_OPENAI_VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 5},
    "two": {"temperature": 0.9, "seed": 6, "n": 2},
    "stop": {"temperature": 0.8, "seed": 7, "stop": ["the", "ing"]},
    "penalties": {"seed": 9, "top_p": 0.9, "frequency_penalty": 0.6, "repetition_penalty": 1.1, "top_k": 40},
    "bias": {"temperature": 0, "logit_bias": {"300": 5, "12": -100}},
    "json": {
        "seed": 10,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": _PERSON}},
    },
    "usage": {"temperature": 0, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}
_CHAT_VARIANTS: dict[str, dict[str, Any]] = {
    **_OPENAI_VARIANTS,
    "logprobs": {"temperature": 0.7, "seed": 8, "logprobs": True, "top_logprobs": 2},
    "tool": {"seed": 11, "tool_choice": "required", "tools": [{"type": "function", "function": _FUNCTION}]},
    "talk": {"temperature": 0, "messages": _LONG_TALK},
}
_COMPLETION_VARIANTS: dict[str, dict[str, Any]] = {
    **_OPENAI_VARIANTS,
    "logprobs": {"temperature": 0.7, "seed": 8, "logprobs": 3},
    "echo": {"temperature": 0, "echo": True, "logprobs": 1},
    "prompts": {"temperature": 0, "prompt": ["Little Hans", "The bear"]},
}
_RESPONSE_VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 5, "instructions": "You tell stories."},
    "json": {"seed": 10, "text": {"format": {"type": "json_schema", "name": "person", "schema": _PERSON}}},
    "tool": {"seed": 11, "tool_choice": "required", "tools": [{"type": "function", **_FUNCTION}]},
    "items": {"temperature": 0, "input": [{"role": "user", "content": [{"type": "input_text", "text": "A goose?"}]}]},
}
_MESSAGE_VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 5, "system": "You tell stories."},
    "stop": {"temperature": 0.8, "seed": 7, "stop_sequences": ["the", "ing"]},
    "tool": {
        "seed": 11,
        "tool_choice": {"type": "any"},
        "tools": [{"name": "remember", "input_schema": _FUNCTION["parameters"]}],
    },
}
_OLLAMA_VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"options": {"temperature": 0, "num_predict": 24}},
    "json": {"options": {"seed": 10, "num_predict": 60}, "format": _PERSON},
}


def chats() -> Iterator[tuple[str, Request]]:
    """Seeded requests of every generating API, streamed and whole, with a name for each."""
    for stream in (True, False):
        kind = "stream" if stream else "whole"
        for name, variant in _CHAT_VARIANTS.items():
            body = {"model": MODEL, "messages": _TALK, "max_tokens": 32, "stream": stream, **variant}
            yield f"chat {name} {kind}", ("/v1/chat/completions", _without_stream_options(body))
        for name, variant in _COMPLETION_VARIANTS.items():
            body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 32, "stream": stream, **variant}
            yield f"completion {name} {kind}", ("/v1/completions", _without_stream_options(body))
        for name, variant in _RESPONSE_VARIANTS.items():
            body = {"model": MODEL, "input": "Tell me of a fox.", "max_output_tokens": 48, "stream": stream, **variant}
            yield f"response {name} {kind}", ("/v1/responses", body)
        for name, variant in _MESSAGE_VARIANTS.items():
            body = {"model": MODEL, "messages": _TALK, "max_tokens": 48, "stream": stream, **variant}
            yield f"message {name} {kind}", ("/v1/messages", body)
        for name, variant in _OLLAMA_VARIANTS.items():
            body = {"model": MODEL, "messages": _TALK, "stream": stream, **variant}
            yield f"ollama {name} {kind}", ("/api/chat", body)
    yield (
        "beam search",
        (
            "/v1/completions",
            {"model": MODEL, "prompt": "The miller", "use_beam_search": True, "n": 3, "max_tokens": 16},
        ),
    )


def _without_stream_options(body: dict[str, Any]) -> dict[str, Any]:
    """Stream options are refused where nothing is streamed."""
    return body if body["stream"] else {name: value for name, value in body.items() if name != "stream_options"}


_VALID: list[Request] = [
    ("/v1/chat/completions", {"model": MODEL, "messages": _LONG_TALK, "max_tokens": 1, **_CHAT_VARIANTS["tool"]}),
    ("/v1/chat/completions", {"model": MODEL, "messages": _TALK, "max_tokens": 1, **_CHAT_VARIANTS["logprobs"]}),
    ("/v1/completions", {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 1, **_COMPLETION_VARIANTS["penalties"]}),
    ("/v1/responses", {"model": MODEL, "input": "A fox?", "max_output_tokens": 1, **_RESPONSE_VARIANTS["tool"]}),
    ("/v1/responses", {"model": MODEL, "max_output_tokens": 1, **_RESPONSE_VARIANTS["items"]}),
    ("/v1/messages", {"model": MODEL, "messages": _LONG_TALK[1:], "max_tokens": 1, **_MESSAGE_VARIANTS["tool"]}),
    ("/api/chat", {"model": MODEL, "messages": _LONG_TALK, "stream": False, **_OLLAMA_VARIANTS["json"]}),
    ("/api/generate", {"model": MODEL, "prompt": "a", "stream": False, "options": {"num_predict": 1, "seed": 3}}),
    ("/completion", {"model": MODEL, "prompt": "a", "n_predict": 2, "seed": 3, "response_fields": ["content"]}),
    ("/infill", {"model": MODEL, "input_prefix": "a", "input_suffix": "b", "n_predict": 1}),
    ("/v1/embeddings", {"model": MODEL, "input": ["a", "b"], "encoding_format": "float", "dimensions": 8}),
    ("/v1/rerank", {"model": MODEL, "query": "a", "documents": ["b", "c"], "top_n": 1}),
    ("/v1/score", {"model": MODEL, "text_1": "a", "text_2": ["b", "c"]}),
    ("/tokenize", {"model": MODEL, "messages": _LONG_TALK, "add_generation_prompt": True}),
    ("/detokenize", {"model": MODEL, "tokens": [5, 6, 7]}),
    ("/v1/batches", {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"}),
    ("/v1/conversations", {"items": [{"type": "message", "role": "user", "content": "a"}], "metadata": {"a": "b"}}),
]
_VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    1e9,
    2**63,
    "",
    "abc",
    "\ud7ff",
    [],
    [None],
    {},
    {"a": 1},
    [[1, 2]],
    "x" * 300,
]


def bad_requests(count: int) -> Iterator[tuple[str, Request]]:
    """`count` bodies that differ from valid ones in one or two places; nearly all are refused."""
    generator = random.Random(20261128)
    for number in range(count):
        path, valid = _VALID[number % len(_VALID)]
        body = copy.deepcopy(valid)
        for _ in range(generator.choice((1, 1, 2))):
            _damage(body, generator)
        yield f"{number:04} {path}", (path, body)


def _damage(body: dict[str, Any], generator: random.Random) -> None:
    """Change one place, any depth, in place."""
    places = list(_places(body))
    container, key = generator.choice(places)
    way = generator.randrange(5)
    value = copy.deepcopy(generator.choice(_VALUES))
    if way == 0 and isinstance(container, dict):
        del container[key]
    elif way == 1 and isinstance(container, dict):
        container[f"{key}x"] = container.pop(key)
    elif way == 2 and isinstance(container, dict):
        container["surprise"] = value
    elif way == 3 and isinstance(container[key], (int, float)) and not isinstance(container[key], bool):
        container[key] = generator.choice((-container[key] - 1, container[key] * 1000 + 999, str(container[key])))
    else:
        container[key] = value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


def agents_requests() -> Iterator[tuple[str, dict[str, str], Request]]:
    """Name, headers and request of every turn that coding agents were recorded to send."""
    for file in sorted(AGENTS.glob("*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        for number, request in enumerate(record["requests"]):
            common = {name: value for name, value in record["common"].items() if name not in request["leaves_out"]}
            body = {**common, **request["body"], "model": MODEL, "stream": True, "temperature": 0}
            if request["path"] == "/v1/responses":
                body["max_output_tokens"] = 8
            else:
                body["max_tokens"] = 8
            yield f"{file.stem} {number}", record["headers"], (request["path"], body)
