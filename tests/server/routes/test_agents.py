"""Requests that coding agents sent, turn by turn, when they edited two files: the shapes of real requests.

tests/clients/test_agents.py runs the agents and writes these records.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server import anthropic, openai_responses
from tests.server.api import NAME, Api, open_api, parse_events
from tests.server.formats.templates import OWN
from tests.server.scripted import TEMPLATE, ScriptedEngine, alike
from tests.texts import shared

RECORDS = Path(__file__).parents[1] / "agents"
AGENTS = sorted(path.stem for path in RECORDS.glob("*.json"))
Call = tuple[str, Any]


def record(agent: str) -> Any:
    return json.loads((RECORDS / f"{agent}.json").read_text(encoding="utf-8"))


def body(found: Any, request: Any) -> dict[str, Any]:
    """Return a request's body: the fields common to the record, and the request's own."""
    common = {name: value for name, value in found["common"].items() if name not in request["leaves_out"]}
    return {**common, **request["body"]}


def read_message_stream(text: str) -> tuple[list[Call], int, int]:
    """Return the calls in a stream of /v1/messages, the number of prompt tokens, and how many of them were cached."""
    message = anthropic.folded(anthropic.named_events(text))
    calls = [(block["name"], block["input"]) for block in message["content"] if block["type"] == "tool_use"]
    hits = message["usage"]["cache_read_input_tokens"]
    return calls, message["usage"]["input_tokens"] + hits, hits


def read_response_stream(text: str) -> tuple[list[Call], int, int]:
    """The same for /v1/responses."""
    response = openai_responses.folded(openai_responses.events_of(text))
    calls: list[Call] = []
    for item in response["output"]:
        if item["type"] == "function_call":
            calls.append((item["name"], json.loads(item["arguments"])))
        elif item["type"] == "custom_tool_call":
            calls.append((item["name"], {"input": item["input"]}))
    usage = response["usage"]
    return calls, usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def read_chat_stream(text: str) -> tuple[list[Call], int, int]:
    """The same for /v1/chat/completions."""
    *chunks, done = parse_events(text)
    assert done == "[DONE]"
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for part in choice["delta"].get("tool_calls") or []:
                names.setdefault(part["index"], part["function"].get("name") or "")
                arguments[part["index"]] = arguments.get(part["index"], "") + part["function"]["arguments"]
    calls = [(name, json.loads(arguments[index])) for index, name in names.items()]
    usage = chunks[-1]["usage"]
    return calls, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


READERS: dict[str, Callable[[str], tuple[list[Call], int, int]]] = {
    "/v1/messages": read_message_stream,
    "/v1/responses": read_response_stream,
    "/v1/chat/completions": read_chat_stream,
}


def scripted_calls(text: str) -> list[Call]:
    """Return the calls in the script's text."""
    parts = [part.partition("</tool_call>")[0] for part in text.split("<tool_call>")[1:]]
    return [(call["name"], call["arguments"]) for call in map(json.loads, parts)]


async def replay_requests(api: Api, found: Any) -> list[tuple[list[Call], float]]:
    """Send every request of a record; each must be accepted. Return the calls of each turn's answer, and the share of
    its prompt that was cached. Requests without tools ask for a title of the conversation, and are no turns.
    """
    turns = []
    for request in found["requests"]:
        sent = body(found, request)
        answer = await api.http.post(request["path"], json={**sent, "model": NAME}, headers=found["headers"])
        assert answer.status_code == 200, answer.text
        calls, tokens, hits = READERS[request["path"].partition("?")[0]](answer.text)
        if sent.get("tools"):
            turns.append((calls, hits / tokens))
    return turns


def test_agent_records_exist() -> None:
    assert {"claude_code", "codex", "codex_patches", "opencode", "qwen_code"} <= set(AGENTS)


@pytest.mark.few(1)
@pytest.mark.parametrize("agent", AGENTS)
async def test_agent_turns_are_accepted_and_reuse_cached_prefix(agent: str) -> None:
    agent_record = record(agent)
    engine = ScriptedEngine(agent_record["script"])
    async with open_api(engine, chat_template=TEMPLATE, tool_call_parser="hermes", reasoning_parser="think") as api:
        turns = await replay_requests(api, agent_record)
    answers = [text for text in agent_record["script"] if text]
    assert [calls for calls, _ in turns] == [scripted_calls(text) for text in answers]
    assert len(answers[0]) > 20
    assert all(share >= 0.9 for _, share in turns[1:]), [share for _, share in turns]


async def shared_prefix_ratio(agent: str, source: str) -> float:
    """Return the share of the second turn's prompt that the first turn's prompt begins with, as a template renders
    both.
    """
    agent_record = record(agent)
    requests = [{**body(agent_record, each), "model": NAME} for each in agent_record["requests"]]
    async with open_api(ScriptedEngine(["x"]), chat_template=source) as api:
        for sent, request in zip(requests, agent_record["requests"], strict=True):
            answer = await api.http.post(request["path"], json=sent)
            assert answer.status_code == 200, answer.text
        first, second = [
            each.prompt_ids for each, sent in zip(api.engine.seen, requests, strict=True) if sent.get("tools")
        ][:2]
    return alike(first, second) / len(second)


@pytest.mark.few(1)
@pytest.mark.parametrize("template", ["Qwen3.5-4B", "unsloth-mistral-Devstral-Small-2507"])
@pytest.mark.parametrize("agent", AGENTS)
async def test_published_templates_keep_prefix_across_agent_turns(agent: str, template: str) -> None:
    """Claude Code sends a system message after the user's, which Qwen's template rejects."""
    source = (shared("templates") / f"{template}.jinja").read_text(encoding="utf-8")
    assert await shared_prefix_ratio(agent, source) >= 0.9


@pytest.mark.few(1)
@pytest.mark.parametrize("template", ["GLM-4.7-Flash", "Kimi-K2-Instruct", "MiniMax-M3", "Reka-Edge"])
async def test_claude_code_keeps_prefix_with_more_published_templates(template: str) -> None:
    source = (shared("templates") / f"{template}.jinja").read_text(encoding="utf-8")
    assert await shared_prefix_ratio("claude_code", source) >= 0.9


@pytest.mark.few(1)
@pytest.mark.parametrize("template", ["openai_list", "element_names", "python_dict", "fenced"])
async def test_claude_code_keeps_prefix_with_any_call_syntax(template: str) -> None:
    assert await shared_prefix_ratio("claude_code", OWN[template]) >= 0.9


async def test_cache_marks_and_billing_lines_change_no_prompt_token() -> None:
    """Cache marks, the billing line and the user's id change from request to request, and mean nothing to the model. A
    date has a meaning: it stays where the caller put it, and all text before it is found in the cache.
    """

    def make_body(day: int, mark: int, *texts: str) -> dict[str, Any]:
        """The cache mark is on one of the user's texts; the date is in the last system text."""
        billing = f"x-anthropic-billing-header: cc_version=2.1.{day}.{mark}a; cc_entrypoint=cli; cch={mark}f3;"
        system_texts = [billing, "You are careful. " * 50, f"Today's date: 2026-11-{day}."]
        marks = [{"cache_control": {"type": "ephemeral"}} if at == mark else {} for at in range(len(texts))]
        content = [{"type": "text", "text": text, **each} for text, each in zip(texts, marks, strict=True)]
        return {
            "model": NAME,
            "max_tokens": 1,
            "metadata": {"user_id": f"session-{mark}"},
            "system": [{"type": "text", "text": text} for text in system_texts],
            "messages": [{"role": "user", "content": content}],
        }

    async with open_api(ScriptedEngine(["x"]), chat_template=TEMPLATE) as api:
        bodies = (make_body(22, 0, "One.", "Two."), make_body(22, 1, "One.", "Two."), make_body(23, 0, "One.", "Two."))
        for sent in (*bodies, make_body(22, 1, "One.", "Two.", "It is now 14:03.")):
            answer = await api.http.post("/v1/messages", json=sent)
            assert answer.status_code == 200, answer.text
        first, marked, next_day, later = [each.prompt_ids for each in api.engine.seen]
    assert first == marked
    texts = [bytes(token for token in ids if token < 256).decode() for ids in (first, next_day, later)]
    assert [text.count("2026-11-22") for text in texts] == [1, 0, 1]
    assert "2026-11-23" in texts[1]
    assert "billing" not in texts[0]
    assert texts[0][: alike(first, next_day) - 1].endswith("Today's date: 2026-11-2"), "all before the date"
    assert texts[2].startswith(texts[0].partition("Two.")[0] + "Two."), "a text at the end changes nothing before it"
    assert "14:03" in texts[2]
