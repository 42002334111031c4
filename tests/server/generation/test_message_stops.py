"""A stop string ends a chat response if its content contains it, and nowhere else.

Reported at vllm#14399, vllm#38499, vllm#52393, sglang#33152, sglang#40529.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.api import NAME, open_api
from tests.server.formats.test_reasoning_parser import THINKING
from tests.server.say import saying_engine

CHAT = "/v1/chat/completions"
TEMPLATE = THINKING.replace("{%", "{% if tools %}<tool_call>{% endif %}{%", 1)
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"properties": {"p": {"type": "string"}}}}}]
CALL = '<tool_call>\n{"name": "clock", "arguments": {"p": "STOP"}}\n</tool_call>'


def body(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"SAY[[{text}]]END"}]
    return {"messages": messages, "max_tokens": 500, "chat_template_kwargs": {"enable_thinking": True}, **more}


def server(**options: Any) -> Any:
    return open_api(saying_engine(**options), chat_template=TEMPLATE, tool_call_parser="hermes")


@pytest.mark.parametrize(
    ("text", "stop", "reasoning", "content", "reason"),
    [
        ("I think. STOP\n</think>\n\nAnswer: two.", ["STOP"], "I think. STOP", "Answer: two.", None),
        ("I think. STOP\n</think>\n\nAnswer: STOP two.", ["STOP"], "I think. STOP", "Answer: ", "STOP"),
        ("hm\n</think>\n\nA", ["\n\n"], "hm", "A", None),
        ("hm\n</think>\n\nA\n\nB", ["\n\n"], "hm", "A", "\n\n"),
        ("hm\n</think>\n\nA", [">\n\nA"], "hm", "A", None),
        ("hm\n</think>\n\nA", ["</think>"], "hm", "A", None),
        ("hm\n</think>\n\nSTOP", ["STOP"], "hm", "", "STOP"),
        ("hm ST</think>OP here", ["STOP"], "hm ST", "OP here", None),
        ("hm </think>SToP", ["STOP"], "hm", "SToP", None),
        ("hm </think>STO", ["STOP"], "hm", "STO", None),
        ("hm </think>aabab!", ["abab", "b"], "hm", "aa", "b"),
        ("only STOP thinking", ["STOP"], "only STOP thinking", "", None),
    ],
)
async def test_stop_string_matches_content_and_not_reasoning(
    text: str, stop: list[str], reasoning: str, content: str, reason: str | None
) -> None:
    async with server() as api:
        whole = await api.post(CHAT, body(text, stop=stop))
        choice = whole["choices"][0]
        assert choice["message"].get("reasoning", "") == reasoning
        assert choice["message"]["content"] == content
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)


async def test_stop_string_matches_content_around_tool_calls_only() -> None:
    text = f"hm </think>I call.\n{CALL}\n"
    async with server() as api:
        for stop in ("STOP", "arguments", "</tool_call>", "<tool_call>"):
            choice = (await api.post(CHAT, body(text, stop=stop, tools=TOOLS)))["choices"][0]
            assert choice["finish_reason"] == "tool_calls", stop
            assert choice["message"]["content"] == "I call."
            assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"p": "STOP"}'
        choice = (await api.post(CHAT, body(text, stop="call", tools=TOOLS)))["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "call")
        assert choice["message"]["content"] == "I "
        assert "tool_calls" not in choice["message"]
        choice = (await api.post(CHAT, body(text + "Now STOP it", stop="STOP", tools=TOOLS)))["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "STOP")
        assert choice["message"]["content"] == "I call.\nNow "


async def test_anthropic_and_ollama_apis_match_stop_in_content_only() -> None:
    text = "<think>STOP? </think>\n\nYes. STOP it"
    messages = [{"role": "user", "content": f"SAY[[{text}]]END"}]
    async with server() as api:
        request = {
            "messages": messages,
            "max_tokens": 500,
            "stop_sequences": ["STOP"],
            "thinking": {"type": "adaptive"},
        }
        message = await api.post("/v1/messages", {"model": NAME, **request})
        assert [part.get("text", part.get("thinking")) for part in message["content"]] == ["STOP?", "Yes. "]
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "STOP")
        line = await api.post(
            "/api/chat", {"messages": messages, "stream": False, "think": True, "options": {"stop": ["STOP"]}}
        )
        assert (line["message"]["thinking"], line["message"]["content"]) == ("STOP?", "Yes. ")


async def test_completions_stop_and_stop_token_ids_match_all_text() -> None:
    async with server() as api:
        request = {"prompt": "SAY[[hm STOP</think>STOP]]END", "max_tokens": 100, "stop": "STOP"}
        choice = (await api.post("/v1/completions", request))["choices"][0]
        assert (choice["text"], choice["stop_reason"]) == ("hm ", "STOP")
        choice = (await api.post(CHAT, body("hm! </think>A!", stop_token_ids=[ord("!")])))["choices"][0]
        assert (choice["message"]["reasoning"], choice["stop_reason"]) == ("hm", ord("!"))


async def test_stop_string_honors_min_tokens_and_include_stop_str() -> None:
    text = "h </think>aXbXc"
    async with server() as api:
        for least, content in ((0, "a"), (11, "a"), (12, "aXb"), (14, "aXbXc")):
            choice = (await api.post(CHAT, body(text, stop="X", min_tokens=least)))["choices"][0]
            assert choice["message"]["content"] == content, least
        request = body(text, stop="X", include_stop_str_in_output=True)
        assert (await api.post(CHAT, request))["choices"][0]["message"]["content"] == "aX"


async def test_logprobs_end_where_content_ends() -> None:
    text = "h STOP </think>So é STOP it"
    async with server() as api:
        for include, shown in ((False, "h STOP </think>So é "), (True, "h STOP </think>So é STOP")):
            request = body(text, stop="STOP", logprobs=True, include_stop_str_in_output=include, n=2)
            whole = await api.post(CHAT, request)
            for choice in whole["choices"]:
                tokens = choice["logprobs"]["content"]
                assert bytes(byte for token in tokens for byte in token["bytes"]) == shown.encode()
            events = await api.events(CHAT, request)
            streamed = [
                byte
                for event in events
                for choice in event["choices"]
                if choice["index"] == 1 and choice["logprobs"]
                for token in choice["logprobs"]["content"]
                for byte in token["bytes"]
            ]
            assert bytes(streamed) == shown.encode()


PIECES = ["a", "é", "ST", "OP", "STOP", " ", "\n", "</think>", "<think>", CALL, "<tool_call>", "{"]


@settings(deadline=None)
@given(
    parts=st.lists(st.sampled_from(PIECES), max_size=9),
    stop=st.lists(st.sampled_from(["STOP", "OP", "a", "aa", "é ", "\n", "k>", '"name"', "{"]), min_size=1, max_size=3),
    burst=st.integers(2, 9),
    more=st.fixed_dictionaries(
        {},
        optional={
            "logprobs": st.just(True),
            "include_stop_str_in_output": st.just(True),
            "min_tokens": st.integers(0, 12),
            "return_token_ids": st.just(True),
            "n": st.just(2),
        },
    ),
)
async def test_stop_position_does_not_depend_on_token_bursts(
    parts: list[str], stop: list[str], burst: int, more: dict[str, Any]
) -> None:
    request = body("".join(parts), stop=stop, tools=TOOLS, **more)
    async with server(burst=1) as api:
        whole = await api.post(CHAT, request)
    async with server(burst=burst) as api:
        burst_whole = await api.post(CHAT, request)
        events = await api.events(CHAT, {**request, "stream_options": {"include_usage": True}})
    assert comparable_response(burst_whole) == comparable_response(whole)
    assert comparable_response(merge_chunks(events)) == comparable_response(whole)


def comparable_response(whole: dict[str, Any]) -> Any:
    choices = []
    for choice in whole["choices"]:
        message = choice["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
        logprobs = choice["logprobs"] and [token["token"] for token in choice["logprobs"]["content"]]
        parts = (message["content"] or "", message.get("reasoning", ""), calls, logprobs or [], choice["token_ids"])
        choices.append((parts, choice["finish_reason"], choice["stop_reason"]))
    return choices, whole["usage"]["completion_tokens"]


def merge_chunks(events: list[Any]) -> dict[str, Any]:
    """The whole response, merged from chunks as a client does."""
    usage = events.pop()["usage"]
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        (choice,) = event["choices"]
        empty = {"message": {"content": "", "reasoning": "", "tool_calls": []}, "logprobs": {"content": []}}
        known = choices.setdefault(choice["index"], {**empty, "token_ids": None})
        message, delta = known["message"], choice["delta"]
        for name in ("content", "reasoning"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls") or []:
            if "id" in call:
                message["tool_calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
            message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        known["logprobs"]["content"] += (choice["logprobs"] or {}).get("content") or []
        if choice["token_ids"] is not None:
            known["token_ids"] = (known["token_ids"] or []) + choice["token_ids"]
        known |= {"finish_reason": choice["finish_reason"], "stop_reason": choice.get("stop_reason")}
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}
