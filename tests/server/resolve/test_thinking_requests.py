"""Models that think, and how requests and prompts control it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from quire.server.formats.reasoning_parser import ReasoningFormat
from quire.server.protocol.chat import ChatRequest
from quire.server.resolve.chat import build_message_format
from quire.server.resolve.tool_use import RequestTools
from tests.server.resolve.test_tool_requests import HELLO, PATH, prompt, speaker
from tests.texts import CHATML, byte_level_tokenizer

SWITCHED = CHATML + "{% if enable_thinking is defined and not enable_thinking %}OFF{% endif %}"
THINKS = "{{ messages[-1]['content'] }}<think>\n{# </think> #}"


async def test_messages_switch_thinking_off_when_no_template_variables_are_sent() -> None:
    async with speaker("x", chat_template=SWITCHED) as api:
        body = {"messages": HELLO, "max_tokens": 9, "thinking": {"type": "disabled"}}
        assert (await api.http.post("/v1/messages", json=body)).status_code == 200
        assert "OFF" in prompt(api)


async def test_grammar_is_refused_under_its_own_name_when_the_model_thinks_before_it() -> None:
    async with speaker("x", chat_template=THINKS) as api:
        response = await api.http.post(PATH, json={"messages": HELLO, "guided_regex": "("})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_regex")


def test_answer_starts_in_thinking_when_the_prompt_ends_with_a_special_token_that_opens_it() -> None:
    tokenizer = byte_level_tokenizer().tokenizer
    formats = SimpleNamespace(
        reasoning_format=ReasoningFormat("marked by tokens", "<|bos|>", "<|im_start|>"), content_delimiters=None
    )
    model: Any = SimpleNamespace(tokenizer=tokenizer, chat_formats=formats)
    body = ChatRequest.model_validate({"messages": HELLO})
    starts = []
    for text in ("Hi<|bos|>", "Hi<|bos|><|im_start|>", "Hi"):
        prompt: Any = SimpleNamespace(ids=tokenizer.encode(text, add_special_tokens=False))
        message_format = build_message_format(body, RequestTools(), prompt, model)
        assert message_format is not None
        starts.append(message_format.starts_in_thinking)
    assert starts == [True, False, None]
