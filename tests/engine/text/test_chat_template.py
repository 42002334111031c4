"""Tests that chat templates render as in transformers, and that messages a template rejects raise InvalidRequest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.engine.common.errors import InvalidRequest, ModelError
from quire.engine.text.conversation.chat_template import ChatRenderer, Message
from tests.texts import CHATML, SHARED, shared

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
TEMPLATES = sorted((SHARED / "templates").glob("*.jinja"))
DIALOGUES: list[list[Message]] = [
    [{"role": "user", "content": "Hello <b>there</b> 'you' & 日本語"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2\n"},
        {"role": "user", "content": "  and 2+2? "},
    ],
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather <somewhere>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def renderer(template: str) -> ChatRenderer:
    return ChatRenderer({"default": template}, SPECIAL)


def transformers_text(template: str, messages: list[Message], tools: Any, add_generation_prompt: bool) -> str | None:
    """The text that transformers renders, or None if the template rejects the messages."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered, _ = render_jinja_template(
            [messages], tools, chat_template=template, add_generation_prompt=add_generation_prompt, **SPECIAL
        )
    except Exception:
        return None
    return str(rendered[0])


@pytest.mark.few(16)
@pytest.mark.parametrize("path", TEMPLATES or [None], ids=lambda path: path.stem if path else "none")
def test_published_templates_render_as_in_transformers(path: Path | None) -> None:
    shared("templates")
    assert path is not None
    template = path.read_text(encoding="utf-8")
    chat_renderer = renderer(template)
    for messages in DIALOGUES:
        for tools in (None, TOOLS) if chat_renderer.capabilities.shows_tools else (None,):
            for add_generation_prompt in (True, False):
                expected = transformers_text(template, messages, tools, add_generation_prompt)
                if expected is None:  # the conversation is adapted: see test_conversations.py
                    text = chat_renderer.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
                    assert all(message["content"].strip() in text for message in messages)
                else:
                    assert (
                        chat_renderer.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
                        == expected
                    )


def test_chatml_renders_as_in_transformers() -> None:
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert renderer(CHATML).render(DIALOGUES[1]) == expected == transformers_text(CHATML, DIALOGUES[1], None, True)


def test_content_parts_are_joined_and_null_content_is_empty() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}, {"role": "user"}]
    template = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    assert renderer(template).render(messages) == "[user:one\ntwo][assistant:][user:]"


def test_tool_arguments_are_parsed_and_reasoning_content_is_set() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "é"]}'}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call], "reasoning": "hm"}]
    template = "{{ messages[0].tool_calls[0].function.arguments | tojson }}{{ messages[0].reasoning_content }}"
    assert renderer(template).render(messages) == '{"x": [1, "é"]}hm'


def test_chat_template_kwargs_reach_template_but_override_no_parameter() -> None:
    template = "{{ enable_thinking }} {{ bos_token }} {{ documents }} {{ tools }}"
    assert renderer(template).render([], variables={"enable_thinking": False, "self": 1}) == "False <s> None None"
    with pytest.raises(InvalidRequest, match="messages") as caught:
        renderer(template).render([], variables={"messages": []})
    assert caught.value.param == "chat_template_kwargs"


def test_generation_block_renders_body() -> None:
    template = "{% for m in messages %}{% generation %}{{ m.content }}!{% endgeneration %}{% break %}{% endfor %}"
    assert renderer(template).render([{"role": "user", "content": "x"}]) == "x!"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content.x }}", "no element 7"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_template_exception_becomes_invalid_request(template: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        renderer(template).render([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_missing_chat_template_raises_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatRenderer({}, {}).render([{"role": "user", "content": "x"}])


def test_template_with_syntax_error_raises_model_error() -> None:
    with pytest.raises(ModelError, match="default"):
        renderer("{% if %}")


def test_tool_use_template_is_selected_with_tools() -> None:
    chat_renderer = ChatRenderer({"default": "plain", "tool_use": "tools"}, {})
    assert (chat_renderer.render([]), chat_renderer.render([], tools=TOOLS)) == ("plain", "tools")


def test_missing_tool_description_is_empty_if_template_needs_string() -> None:
    """gpt-oss's template concatenates the description with a string, even if there is none."""
    tool = {"type": "function", "function": {"name": "clock"}}
    needing_template = (
        "{% for t in tools or [] %}{{ t.function.name + ': ' + t.function.description + '\n' }}{% endfor %}"
    )
    showing_template = "{{ tools | tojson }}{{ messages[0].content }}"
    messages = [{"role": "user", "content": "Hi"}]
    assert ChatRenderer({"default": needing_template}, {}).render(messages, tools=[tool]) == "clock: \n"
    assert ChatRenderer({"default": showing_template}, {}).render(messages, tools=[tool]) == json.dumps([tool]) + "Hi"


def test_content_joins_thinking_if_template_rejects_both() -> None:
    rejecting_template = (
        "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}"
        "{% endif %}[{{ m.thinking }}|{{ m.content }}]"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    turn = {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm", "tool_calls": [call]}
    user = {"role": "user", "content": "Hi"}
    accepting_template = rejecting_template.replace("raise_exception('both')", "''")
    assert ChatRenderer({"default": rejecting_template}, {}).render([user, turn]) == "[|Hi][Hm\n\nWait.|]clock{}"
    assert ChatRenderer({"default": accepting_template}, {}).render([user, turn]) == "[|Hi][Hm|Wait.]clock{}"
    plain = {**turn, "reasoning_content": None}
    assert ChatRenderer({"default": rejecting_template}, {}).render([user, plain]) == "[|Hi][|Wait.]clock{}"
