"""Reasoning is separated from content, wherever the text is split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import ThinkingBudget
from quire.engine.text.conversation.chat_template import ChatRenderer
from quire.server.config import ReasoningParser as Choices
from quire.server.formats.reasoning_parser import (
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningParser,
    find_reasoning_format,
    make_engine_thinking_budget,
)
from tests.server.api import Api, open_api
from tests.server.fake import FakeEngine, scripted
from tests.server.formats.test_tools import all_cuts, in_pieces
from tests.texts import CHATML, byte_level_tokenizer, shared

EOS = 258
PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
THINK = next(row for row in REASONING_FORMATS if row.name == "think")
THINKING = (
    CHATML.replace("assistant\n{%", "assistant\n{% if enable_thinking is defined %}<think>\n"
    "{% if not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}{{ reasoning_effort }}{%")
)  # fmt: skip
"""A template like those of Qwen 3 and 3.5: the model decides whether to think, or the template does."""


def read(format: ReasoningFormat, begun: bool | None, pieces: Sequence[str]) -> tuple[str, str, int]:
    """Return reasoning, content, and the number of reasoning tokens; each character is a token here."""
    parser = ReasoningParser(format, begun)
    reasoning = content = ""
    place = 0
    for position, piece in enumerate(pieces):
        more = parser.extract_reasoning(piece, range(place, place + len(piece)), final=position == len(pieces) - 1)
        place += len(piece)
        reasoning, content = reasoning + more[0], content + more[1]
    return reasoning, content, parser.num_reasoning_tokens


@pytest.mark.parametrize(
    ("begun", "text", "reasoning", "content", "thinking"),
    [
        (None, "<think>\nhm, so\n</think>\n\n4.", "hm, so", "4.", "<think>\nhm, so\n</think>"),
        (None, "\n<think>a</think>b", "a", "b", "\n<think>a</think>"),
        (None, "no thinking </think>", "", "no thinking </think>", ""),
        (None, "a <think>b</think>", "", "a <think>b</think>", ""),
        (None, "<thin air", "", "<thin air", ""),
        (None, " \n", "", " \n", ""),
        (None, "", "", "", ""),
        (True, "hm\n\nso</thi </think>\n4 ", "hm\n\nso</thi", "4 ", "hm\n\nso</thi </think>"),
        (True, "<think>\nhm</think>4", "hm", "4", "<think>\nhm</think>"),
        (True, "</think>4", "", "4", "</think>"),
        (True, "hm </think> ", "hm", "", "hm </think>"),
        (True, "cut off </thi", "cut off </thi", "", "cut off </thi"),
        (True, "hm</think>a</think>b", "hm", "a</think>b", "hm</think>"),
        (False, "\n\n4</think>", "", "4</think>", ""),
        (False, "<think>4", "", "<think>4", ""),
    ],
)
def test_reasoning_and_content_separate_same_at_any_split(
    begun: bool | None, text: str, reasoning: str, content: str, thinking: str
) -> None:
    for pieces in [[text], *all_cuts(text)]:
        assert read(THINK, begun, pieces) == (reasoning, content, len(thinking)), pieces


@pytest.mark.parametrize("format", REASONING_FORMATS, ids=lambda format: format.name)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_text_with_reasoning_tags_parses_same_in_pieces(format: ReasoningFormat, data: st.DataObject) -> None:
    part = st.sampled_from([format.begin, format.end, "<", "</", "[", " ", "\n", "é", "ab"])
    text = "".join(data.draw(st.lists(part, max_size=10)))
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    begun = data.draw(st.sampled_from([None, True, False]))
    assert read(format, begun, in_pieces(text, lengths)) == read(format, begun, [text])


SPOKEN: dict[str, tuple[str | None, dict[str, Any], bool | None]] = {
    "Qwen-Qwen3-0.6B": ("think", {}, None),
    "Qwen3.5-4B": ("think", {}, True),
    "Qwen-QwQ-32B": ("think", {"enable_thinking": True}, True),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("think", {"enable_thinking": True}, True),
    "deepseek-ai-DeepSeek-V3.1": ("think", {"thinking": True}, True),
    "GLM-4.7-Flash": ("think", {}, True),
    "ByteDance-Seed-OSS": ("seed_oss", {}, None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", {}, None),
    "Cohere2MoE": ("cohere", {}, True),
    "Qwen-Qwen2.5-7B-Instruct": (None, {}, None),
    "meta-llama-Llama-3.1-8B-Instruct": (None, {}, None),
}
FORBIDDEN = {
    "Qwen-Qwen3-0.6B": {"enable_thinking": False},
    "Qwen3.5-4B": {"enable_thinking": False},
    "Qwen-QwQ-32B": {"enable_thinking": False},
    "GLM-4.7-Flash": {"enable_thinking": False},
    "deepseek-ai-DeepSeek-V3.1": {"thinking": False},
    "ByteDance-Seed-OSS": {"thinking_budget": 0},
}


def prompt_of(template: str, variables: dict[str, Any]) -> tuple[str, str]:
    """The template's text, and a prompt it renders."""
    text = (shared("templates") / f"{template}.jinja").read_text(encoding="utf-8")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return text, ChatRenderer({"default": text}, special).render(HELLO, variables=variables)


@pytest.mark.parametrize("template", SPOKEN)
def test_published_templates_reveal_reasoning_format_and_start(template: str) -> None:
    name, variables, begun = SPOKEN[template]
    text, prompt = prompt_of(template, variables)
    format = find_reasoning_format("auto", text)
    assert (None if format is None else format.name) == name
    if format is not None:
        assert format.starts_in_thinking(prompt) is begun
    assert find_reasoning_format("none", text) is None


@pytest.mark.parametrize("template", FORBIDDEN)
def test_published_templates_can_disable_thinking(template: str) -> None:
    text, prompt = prompt_of(template, FORBIDDEN[template])
    format = find_reasoning_format("auto", text)
    assert format is not None
    assert format.starts_in_thinking(prompt) is False


def test_reasoning_parser_choices_equal_known_formats() -> None:
    assert {row.name for row in REASONING_FORMATS} == set(get_args(Choices)) - {"auto", "none"}


def open_thinking_api(text: str, **options: Any) -> Any:
    options = {"chat_template": THINKING, **options}
    return open_api(FakeEngine(scripted(text.encode(), EOS), eos=[EOS]), **options)


async def post_whole_and_streamed(api: Api, **body: Any) -> tuple[Any, list[Any]]:
    """Return the whole response, and the events of the streamed one."""
    body = {"messages": HELLO, **body}
    return await api.post(PATH, body), await api.events(PATH, {**body, "stream_options": {"include_usage": True}})


def join_deltas(events: list[Any], name: str) -> str:
    return "".join(event["choices"][0]["delta"].get(name) or "" for event in events if event["choices"])


async def test_reasoning_is_sent_under_both_names_and_counted_in_usage() -> None:
    async with open_thinking_api("<think>\nhé?\n</think>\n\nYes.") as api:
        whole, events = await post_whole_and_streamed(api)
    message = whole["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("hé?", "hé?", "Yes.")
    assert whole["choices"][0]["finish_reason"] == "stop"
    for name in ("reasoning", "reasoning_content", "content"):
        assert join_deltas(events, name) == message[name]
    tokens = len("<think>\nhé?\n</think>".encode())
    for usage in (whole["usage"], events[-1]["usage"]):
        assert usage["completion_tokens_details"] == {"reasoning_tokens": tokens}


async def test_include_reasoning_false_omits_reasoning() -> None:
    async with open_thinking_api("<think>hm</think>Yes.") as api:
        whole, events = await post_whole_and_streamed(api, include_reasoning=False)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert join_deltas(events, "reasoning") == join_deltas(events, "reasoning_content") == ""
    assert join_deltas(events, "content") == "Yes."
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("<think>hm</think>")


@pytest.mark.parametrize(("enabled", "reasoning", "content"), [(True, "hm", "Yes."), (False, None, "hm</think>Yes.")])
async def test_enable_thinking_kwarg_decides_whether_text_is_reasoning(
    enabled: bool, reasoning: str | None, content: str
) -> None:
    async with open_thinking_api("hm</think>Yes.") as api:
        whole, events = await post_whole_and_streamed(api, chat_template_kwargs={"enable_thinking": enabled})
    message = whole["choices"][0]["message"]
    assert (message.get("reasoning"), message["content"]) == (reasoning, content)
    assert (join_deltas(events, "reasoning"), join_deltas(events, "content")) == (reasoning or "", content)


async def test_reasoning_effort_reaches_template() -> None:
    async with open_thinking_api("Yes.") as api:
        for effort, end in (("low", "assistant\n<think>\nlow"), ("none", "</think>\n\nnone")):
            response = await api.http.post(PATH, json={"messages": HELLO, "reasoning_effort": effort})
            assert "x-ignored-params" not in response.headers
            prompt = bytes(token for token in api.engine.seen[-1].prompt_ids if token < 256).decode()
            assert prompt.endswith(end)
        error = await api.post(PATH, {"messages": HELLO, "reasoning_effort": "much"}, 400)
        assert error["error"]["param"] == "reasoning_effort"
    async with open_thinking_api("Yes.", chat_template=CHATML) as api:
        response = await api.http.post(PATH, json={"messages": HELLO, "reasoning_effort": "low"})
        assert response.headers["x-ignored-params"] == "reasoning_effort"


async def test_reasoning_parser_flag_overrides_template() -> None:
    async with open_thinking_api("[THINK]hm[/THINK]Yes.", reasoning_parser="mistral") as api:
        whole, _ = await post_whole_and_streamed(api)
    assert whole["choices"][0]["message"]["reasoning"] == "hm"
    async with open_thinking_api("<think>hm</think>Yes.", reasoning_parser="none") as api:
        whole, _ = await post_whole_and_streamed(api)
    assert whole["choices"][0]["message"]["content"] == "<think>hm</think>Yes."
    assert "completion_tokens_details" not in whole["usage"]


async def test_reasoning_cut_by_max_tokens_is_returned_and_counted() -> None:
    async with open_thinking_api("<think>hm hm</think>Yes.") as api:
        whole, events = await post_whole_and_streamed(api, max_tokens=9)
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["choices"][0]["message"]["reasoning"] == join_deltas(events, "reasoning") == "hm"
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 9


async def test_earlier_reasoning_reaches_template() -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}:{{ m.content }};{% endfor %}</think>"
    async with open_thinking_api("Yes.", chat_template=template) as api:
        turns = [*HELLO, {"role": "assistant", "content": "4", "reasoning": "2+2"}, *HELLO]
        await api.post(PATH, {"messages": turns})
        assert b"assistant:2+2:4;" in bytes(api.engine.seen[-1].prompt_ids)


def test_thinking_budget_maps_marks_to_token_ids_or_raises() -> None:
    tokenizer = byte_level_tokenizer().tokenizer
    format = ReasoningFormat("marked by tokens", "<|bos|>", "<|im_start|>")
    assert make_engine_thinking_budget(5, format, True, tokenizer) == ThinkingBudget(5, 257, None)
    assert make_engine_thinking_budget(0, format, None, tokenizer) == ThinkingBudget(0, 257, 256)
    assert make_engine_thinking_budget(5, format, False, tokenizer) is None
    assert make_engine_thinking_budget(-1, format, None, tokenizer) is None
    half = ReasoningFormat("ended by a token", "<think>", "<|im_start|>")
    assert make_engine_thinking_budget(5, half, True, tokenizer) == ThinkingBudget(5, 257, None)
    for unknown in (None, half, THINK):
        with pytest.raises(InvalidRequest, match="thinking_token_budget"):
            make_engine_thinking_budget(5, unknown, None, tokenizer)


async def test_unenforceable_thinking_budget_is_rejected() -> None:
    async with open_thinking_api("<think>hm</think>Yes.") as api:
        for budget in (5, -2):
            error = await api.post(PATH, {"messages": HELLO, "thinking_token_budget": budget}, 400)
            assert error["error"]["param"] == "thinking_token_budget"
        await api.post(PATH, {"messages": HELLO, "thinking_token_budget": -1})
