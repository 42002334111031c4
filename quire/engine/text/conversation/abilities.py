"""What a chat template takes and shows, whatever the conversation is; found out by rendering a few made-up messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from typing import Any

from quire.engine import clock
from quire.engine.text.conversation.units import Message
from quire.engine.text.parts import in_parts

Tools = Sequence[dict[str, Any]] | None
_TEXT = "qtextq"
_USER: Message = {"role": "user", "content": _TEXT}
_FUNCTION = {"name": "qcalledq", "arguments": {"qkeyq": "qvalueq"}}
_CALLED = ("qcalledq", "qidqidqid", "qvalueq")


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """The form in which a template takes its variables."""

    parts: bool = False
    """Content is a list of parts, as some templates of models that see want it: of a string they show nothing."""
    tool_list: bool = False
    """`tools` is an empty list where there are none."""
    functions: bool = False
    """`functions`, JSON, and `datetime` are variables, as FireFunction's template has them."""

    shows: bool = True
    """A user's text. A template that never shows it, such as one that is the same for all, is rendered as it is."""

    def variables(self, messages: list[Message], tools: Tools) -> dict[str, Any]:
        more: Mapping[str, Any] = {}
        if self.functions:
            functions = [tool.get("function", tool) for tool in tools or ()]
            more = {
                "functions": json.dumps(functions, indent=4),
                "datetime": datetime.fromtimestamp(clock.time()).strftime("%Y-%m-%d"),
            }
        turns = [in_parts(message) for message in messages] if self.parts else messages
        return {**more, "messages": turns, "tools": tools or ([] if self.tool_list else None)}


@dataclass(frozen=True, slots=True)
class TemplateAbilities:
    """What a template shows of tools."""

    tools: bool
    """The tools that a model may call."""
    calls: bool
    """Calls that an assistant made."""
    text_arguments: bool
    """It wants the arguments of calls as JSON in a string."""
    undescribed: bool
    """Tools that have no description; it fails on them where it shows only others."""
    undescribed_parameters: bool
    """The same of parameters."""


def input_of(render: Callable[[TemplateInput, list[Message]], str | None]) -> TemplateInput:
    """The first form in which a template shows a user's text. `render` gives None where the template refuses."""
    for functions, tool_list, parts in product((False, True), repeat=3):
        form = TemplateInput(parts, tool_list, functions)
        if _TEXT in (render(form, [_USER]) or ""):
            return form
    return TemplateInput(shows=False)


def abilities_of(render: Callable[[list[Message], Tools], str | None], *, tool_template: bool) -> TemplateAbilities:
    """`render` gives None where the template refuses. `tool_template`: the model has one for conversations with tools
    alone."""

    def shows(messages: list[Message], tools: Tools, *marks: str) -> bool:
        text = render(messages, tools) or ""
        return any(mark in text for mark in marks)

    tool = probe_tool()
    shown = tool_template or shows([_USER], [tool], "qnameq")
    tools = [tool] if shown else None
    as_object = shows([_USER, _answer(text=False)], tools, *_CALLED) or shows([_answer(text=False)], tools, *_CALLED)
    as_text = not as_object and shows([_USER, _answer(text=True)], tools, _CALLED[0])
    takes = not shows([_USER], [tool], "qnameq")
    return TemplateAbilities(
        tools=shown,
        calls=as_object or as_text,
        text_arguments=as_text,
        undescribed=takes or shows([_USER], [probe_tool(described=False)], "qnameq"),
        undescribed_parameters=takes or shows([_USER], [probe_tool(parameters_described=False)], "qnameq"),
    )


def _answer(*, text: bool) -> Message:
    arguments: Any = _FUNCTION["arguments"]
    function = {**_FUNCTION, "arguments": json.dumps(arguments) if text else arguments}
    call = {"id": "qidqidqid", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def probe_tool(*, described: bool = True, parameters_described: bool = True) -> dict[str, Any]:
    parameter = {"type": "string"} | ({"description": "d"} if parameters_described else {})
    parameters = {"type": "object", "properties": {"qkeyq": parameter}, "required": ["qkeyq"]}
    about = {"description": "d"} if described else {}
    return {"type": "function", "function": {"name": "qnameq", **about, "parameters": parameters}}
