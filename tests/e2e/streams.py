"""Requests of every kind with their whole answers, which must not change whatever happens to the engine."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {
    "name": "remember",
    "parameters": {
        "type": "object",
        "properties": {"what": {"type": "string", "minLength": 20, "maxLength": 60}, "times": {"type": "integer"}},
        "required": ["what", "times"],
        "additionalProperties": False,
    },
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "Once upon a time", "temperature": 0},
    "seeded": {"prompt": "The old woman said", "temperature": 1.0, "seed": 5},
    "two": {"prompt": "A fox and a crow", "temperature": 0.9, "seed": 6, "n": 2},
    "stop": {"prompt": "The king had three", "temperature": 0.8, "seed": 7, "stop": ["the", "ing"]},
    "logprobs": {"prompt": "In the forest", "temperature": 0.7, "seed": 8, "logprobs": 3},
    "listed": {
        **{"prompt": "By the brook", "temperature": 0.8, "seed": 13, "n": 2, "logprobs": 1},
        "logprob_token_ids": [2, 300, 12, 4095],
    },
    "penalties": {
        **{"prompt": "The bear", "temperature": 1.0, "seed": 9, "top_p": 0.9},
        **{"frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.1},
    },
    "echo": {"prompt": "Little Hans", "temperature": 0, "echo": True, "logprobs": 1},
    "json": {
        "prompt": "A person:",
        "temperature": 1.0,
        "seed": 10,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
    },
    "tools": {
        "messages": [{"role": "user", "content": "Remember the fox."}],
        **{"temperature": 1.0, "seed": 11, "tool_choice": "required", "parallel_tool_calls": False},
        "tools": [{"type": "function", "function": TOOL}],
    },
    "chat": {
        "messages": [{"role": "user", "content": "Tell me of a fox."}],
        **{"temperature": 0.9, "seed": 12, "n": 2, "logprobs": True, "top_logprobs": 2},
    },
    "beam": {"prompt": "The miller's daughter", "use_beam_search": True, "n": 3, "max_tokens": 30, "stream": False},
}
"""Beam search cannot stream, so its answer is read whole."""


async def ask_until(ended: asyncio.Task[Any], client: httpx.AsyncClient, expected: dict[str, Any], users: int) -> None:
    """Let `users` clients ask for one kind after another, each at least once, until the task has ended. Every answer
    must equal the `expected` one of its kind.
    """
    kinds = list(KINDS)

    async def user(number: int) -> None:
        while True:
            kind = kinds[number % len(kinds)]
            assert await answer(client, KINDS[kind]) == expected[kind], kind
            number += 1
            if ended.done():
                return

    await asyncio.gather(*[user(number) for number in range(users)])
    await ended


async def answer(client: httpx.AsyncClient, asked: dict[str, Any]) -> Any:
    """Return the joined chunks of each choice of a stream, or the choices of a whole answer; and the prompt and
    completion token counts.
    """
    body = {"max_tokens": 120, "stream": True, "stream_options": {"include_usage": True}} | asked
    path = CHAT if "messages" in body else COMPLETIONS
    if not body["stream"]:
        del body["stream_options"]
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        whole = response.json()
        return whole["choices"], _counts(whole["usage"])
    choices: dict[int, Any] = {}
    usage = None
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        done = False
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                done = done or line == "data: [DONE]"
                continue
            chunk = msgspec.json.decode(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                index = choice.pop("index")
                choices[index] = _joined(choices.get(index), choice)
        assert done
    return choices, _counts(usage)


def _joined(before: Any, after: Any) -> Any:
    """Join two parts of an answer: concatenate texts and lists, merge objects by member; all other values must be
    equal.
    """
    if before is None or after is None:
        return after if before is None else before
    if isinstance(before, str) and isinstance(after, str):
        return before + after
    if isinstance(before, dict):
        return {key: _joined(before.get(key), after.get(key)) for key in before | after if key != "id"}
    if isinstance(before, list) and before and isinstance(before[0], dict) and "index" in before[0]:
        by_index = {call["index"]: call for call in before}
        for call in after:
            by_index[call["index"]] = _joined(by_index.get(call["index"]), call)
        return list(by_index.values())
    if isinstance(before, list):
        return before + after
    assert before == after
    return after


def _counts(usage: dict[str, Any]) -> tuple[int, int]:
    """Token counts without cached tokens, which depend on what else has run."""
    return usage["prompt_tokens"], usage["completion_tokens"]
