from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from typing import Any

from quire.engine.common import clock
from quire.engine.text.conversation.chat_messages import with_content_parts
from quire.engine.text.conversation.message_units import Message

Tools = Sequence[dict[str, Any]] | None
_USER_TEXT = "qtextq"
_USER_MESSAGE: Message = {"role": "user", "content": _USER_TEXT}
_PROBE_FUNCTION = {"name": "qcalledq", "arguments": {"qkeyq": "qvalueq"}}
_CALL_MARKS = ("qcalledq", "qidqidqid", "qvalueq")


@dataclass(frozen=True, slots=True)
class TemplateInputFormat:
    content_parts: bool = False
    """True if content must be a list of parts, because some multimodal templates omit strings."""
    empty_tool_list: bool = False
    """True if `tools` must be an empty list, not None, for a conversation without tools."""
    functions_variable: bool = False

    shows_user_text: bool = True
    """False for a constant template. What it renders is not checked."""

    def make_template_variables(self, messages: list[Message], tools: Tools) -> dict[str, Any]:
        more: Mapping[str, Any] = {}
        if self.functions_variable:
            functions = [tool.get("function", tool) for tool in tools or ()]
            more = {
                "functions": json.dumps(functions, indent=4),
                "datetime": datetime.fromtimestamp(clock.time()).strftime("%Y-%m-%d"),
            }
        turns = [with_content_parts(message) for message in messages] if self.content_parts else messages
        return {**more, "messages": turns, "tools": tools or ([] if self.empty_tool_list else None)}


@dataclass(frozen=True, slots=True)
class TemplateCapabilities:
    shows_tools: bool
    shows_calls: bool
    text_arguments: bool
    undescribed_tools: bool
    undescribed_parameters: bool


def detect_input_format(render: Callable[[TemplateInputFormat, list[Message]], str | None]) -> TemplateInputFormat:
    """`render` returns None if the template refuses."""
    for functions_variable, empty_tool_list, content_parts in product((False, True), repeat=3):
        input_format = TemplateInputFormat(content_parts, empty_tool_list, functions_variable)
        if _USER_TEXT in (render(input_format, [_USER_MESSAGE]) or ""):
            return input_format
    return TemplateInputFormat(shows_user_text=False)


def detect_capabilities(
    render: Callable[[list[Message], Tools], str | None], *, tool_template: bool
) -> TemplateCapabilities:
    """`tool_template`: the model has a separate template for tools."""

    def renders_any(messages: list[Message], tools: Tools, *marks: str) -> bool:
        text = render(messages, tools) or ""
        return any(mark in text for mark in marks)

    tool = make_probe_tool()
    shown = tool_template or renders_any([_USER_MESSAGE], [tool], "qnameq")
    tools = [tool] if shown else None
    as_object = renders_any([_USER_MESSAGE, _make_tool_call_message(text=False)], tools, *_CALL_MARKS) or renders_any(
        [_make_tool_call_message(text=False)], tools, *_CALL_MARKS
    )
    as_text = not as_object and renders_any([_USER_MESSAGE, _make_tool_call_message(text=True)], tools, _CALL_MARKS[0])
    takes = not renders_any([_USER_MESSAGE], [tool], "qnameq")
    return TemplateCapabilities(
        shows_tools=shown,
        shows_calls=as_object or as_text,
        text_arguments=as_text,
        undescribed_tools=takes or renders_any([_USER_MESSAGE], [make_probe_tool(described=False)], "qnameq"),
        undescribed_parameters=takes
        or renders_any([_USER_MESSAGE], [make_probe_tool(parameters_described=False)], "qnameq"),
    )


def _make_tool_call_message(*, text: bool) -> Message:
    arguments: Any = _PROBE_FUNCTION["arguments"]
    function = {**_PROBE_FUNCTION, "arguments": json.dumps(arguments) if text else arguments}
    call = {"id": "qidqidqid", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def make_probe_tool(*, described: bool = True, parameters_described: bool = True) -> dict[str, Any]:
    parameter = {"type": "string"} | ({"description": "d"} if parameters_described else {})
    parameters = {"type": "object", "properties": {"qkeyq": parameter}, "required": ["qkeyq"]}
    about = {"description": "d"} if described else {}
    return {"type": "function", "function": {"name": "qnameq", **about, "parameters": parameters}}
