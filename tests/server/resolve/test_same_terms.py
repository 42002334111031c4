"""Equivalent request fields mean the same in every API: thinking, limits of output tokens, allowed tools."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import Grammar
from quire.engine.text.conversation.chat_template import ChatRenderer
from quire.engine.text.grammar_compiler import GrammarCompiler, make_grammar_vocabulary
from quire.server.formats.thinking_switch import ThinkingSwitch
from tests.server.resolve.test_tool_requests import HELLO, ONE, PATH, TOOLS, prompt, speaker
from tests.texts import CHATML, byte_level_tokenizer

LIMITS: list[tuple[str, dict[str, Any], Any]] = [
    (PATH, {"messages": HELLO}, "max_tokens"),
    (PATH, {"messages": HELLO}, "max_completion_tokens"),
    ("/v1/completions", {"prompt": "a"}, "max_tokens"),
    ("/v1/messages", {"messages": HELLO}, "max_tokens"),
    ("/v1/responses", {"input": "a"}, "max_output_tokens"),
]
SWITCHES = {
    "enable_thinking": "{% if enable_thinking is defined and not enable_thinking %}OFF{% endif %}",
    "thinking": "{% if not thinking %}OFF{% endif %}",
    "skip_thinking": "{% if skip_thinking %}OFF{% endif %}",
    "thinking_budget": "{% if thinking_budget is defined and thinking_budget == 0 %}OFF{% endif %}",
    "reasoning_effort": (
        "{% if reasoning_effort is defined and reasoning_effort not in ['high', 'low', 'no_think'] %}"
        "{{ raise_exception('wrong') }}{% endif %}"
        "{% if reasoning_effort is not defined or reasoning_effort == 'no_think' %}OFF{% endif %}"
    ),
    "thinking_mode": "{% if thinking_mode is defined and thinking_mode == 'chat' %}OFF{% endif %}",
}
THINKING: list[tuple[str, dict[str, Any], bool]] = [
    (PATH, {"messages": HELLO, "reasoning_effort": "none"}, False),
    (PATH, {"messages": HELLO, "reasoning_effort": "high"}, True),
    (PATH, {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}}, False),
    (PATH, {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": True}}, True),
    (PATH, {"messages": HELLO, "chat_template_kwargs": {"thinking": True}}, True),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 9, "thinking": {"type": "disabled"}}, False),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 9, "thinking": {"type": "enabled"}}, True),
    ("/v1/responses", {"input": "Hello", "reasoning": {"effort": "none"}}, False),
    ("/v1/responses", {"input": "Hello", "reasoning": {"effort": "low"}}, True),
    ("/api/chat", {"messages": HELLO, "think": False, "stream": False}, False),
    ("/api/chat", {"messages": HELLO, "think": True, "stream": False}, True),
    ("/api/chat", {"messages": HELLO, "think": "high", "stream": False}, True),
]


@pytest.mark.few(12)
@pytest.mark.parametrize(("path", "body", "thinks"), THINKING)
@pytest.mark.parametrize("name", SWITCHES)
async def test_thinking_fields_of_every_api_set_template_variable(
    name: str, path: str, body: dict[str, Any], thinks: bool
) -> None:
    async with speaker("x", chat_template=CHATML + SWITCHES[name]) as api:
        answer = await api.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert "OFF" not in prompt(api) if thinks else "OFF" in prompt(api)
        assert "x-ignored-params" not in answer.headers


WORDS = [("minimal", "low"), ("low", "low"), ("medium", "high"), ("high", "high"), ("xhigh", "high"), ("max", "high")]


@pytest.mark.parametrize(("effort", "word"), WORDS)
async def test_effort_rejected_by_template_becomes_nearest_accepted(effort: str, word: str) -> None:
    """Tencent's Hy3 and Kimi K3 reject efforts that the APIs have: each was a 400."""
    effort_of = "{{ 'EFFORT=' ~ reasoning_effort }}"
    async with speaker("x", chat_template=CHATML + SWITCHES["reasoning_effort"] + effort_of) as api:
        await api.post(PATH, {"messages": HELLO, "reasoning_effort": effort})
        assert f"EFFORT={word}" in prompt(api)
        if effort != "minimal":
            body = {"messages": HELLO, "max_tokens": 9, "thinking": {"type": "enabled"}}
            await api.post("/v1/messages", {**body, "output_config": {"effort": effort}})
            assert f"EFFORT={word}" in prompt(api)


def test_template_variable_without_effect_is_no_thinking_switch() -> None:
    template = CHATML + "{% set thinking = 1 %}{{ '' if enable_thinking else '' }}"
    assert not ThinkingSwitch.from_template(ChatRenderer({"default": template}, {}), template).is_switchable


@pytest.mark.parametrize(("path", "body", "name"), LIMITS)
async def test_max_tokens_minus_one_is_unlimited_and_excess_is_clipped(
    path: str, body: dict[str, Any], name: str
) -> None:
    async with speaker("x") as api:
        await api.post(path, {**body, name: -1})
        assert api.engine.seen[-1].params.max_tokens is None
        answer = await api.http.post(path, json={**body, name: 100_000})
        assert answer.status_code == 200, answer.text
        assert answer.headers["X-Max-Tokens-Clipped"] == "2048"
        assert api.engine.seen[-1].params.max_tokens == 2048
        assert "X-Max-Tokens-Clipped" not in (await api.http.post(path, json={**body, name: 2048})).headers
        for wrong in (-2, *([] if path == "/v1/completions" else [0])):
            assert name in (await api.http.post(path, json={**body, name: wrong})).text
    async with speaker("x", clip_max_tokens=False) as api:
        assert "too large" in (await api.http.post(path, json={**body, name: 100_000})).text


async def test_prediction_field_is_reported_as_ignored() -> None:
    async with speaker("x") as api:
        body = {"messages": HELLO, "prediction": {"type": "content", "content": "x"}}
        assert (await api.http.post(PATH, json=body)).headers["X-Ignored-Params"] == "prediction"


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools_restrict_tools_in_prompt(mode: str) -> None:
    names = [{"type": "function", "function": {"name": "weather"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}
    async with speaker(ONE) as api:
        answer = await api.post(PATH, {"messages": HELLO, "tools": TOOLS, "tool_choice": choice})
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert '"name": "weather"' in prompt(api)
        assert '"name": "clock"' not in prompt(api)
        assert (api.engine.seen[-1].params.grammar is not None) == (mode == "required")
        names[0]["function"] = {"name": "nobody"}
        error = await api.post(PATH, {"messages": HELLO, "tools": TOOLS, "tool_choice": choice}, 400)
    assert error["error"]["message"] == "tool_choice: there is no tool named nobody"


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (r'root ::= "\u00e9"', "é"),
        (r"root ::= [\u00e0-\u00ff]+", "éü"),
        (r'root ::= "\U0001F600" [\U0001F600-\U0001F64F]', "\U0001f600\U0001f601"),
        (r'root ::= "\x41" [\x42-\x44]', "AB"),
        (r'root ::= "\u0041\u0022"', 'A"'),
        (r'root ::= "\\u00e9"', r"\u00e9"),
    ],
)
def test_gbnf_escapes_match_characters(text: str, good: str) -> None:
    tokenizer = byte_level_tokenizer().tokenizer
    matcher = GrammarCompiler(make_grammar_vocabulary(tokenizer, 259, [258])).new_matcher(Grammar("lark", text))
    for token in tokenizer.encode(good, add_special_tokens=False):
        assert matcher.consume_token(token), good
    assert matcher.is_accepting()


@pytest.mark.parametrize("text", [r'root ::= "\ud800"', r'root ::= "\U00110000"'])
def test_invalid_gbnf_escape_is_rejected(text: str) -> None:
    with pytest.raises(InvalidRequest):
        GrammarCompiler(make_grammar_vocabulary(byte_level_tokenizer().tokenizer, 259, [258])).new_matcher(
            Grammar("lark", text)
        )
