"""Writes tools, calls and results as text, worded like Hermes 2 Pro
(https://huggingface.co/NousResearch/Hermes-2-Pro-Llama-3-8B), whose wording many later models know.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from quire.engine.text.conversation.chat_messages import join_contents

Message = dict[str, Any]

NAME_PLACEHOLDER = "<function-name>"
ARGUMENTS_PLACEHOLDER = "<args-json-object>"
KEYWORDS_PLACEHOLDER = "<parameter-name>=<value>, ..."
HERMES_CALL_FORMAT = (
    f'<tool_call>\n{{"name": "{NAME_PLACEHOLDER}", "arguments": {ARGUMENTS_PLACEHOLDER}}}\n</tool_call>'
)
TOOLS_INTRODUCTION = (
    "You may call one or more functions to assist with the user's request. Their signatures are within "
    "<tools></tools>:\n<tools>\n{tools}\n</tools>\n\n"
    "To call a function, write its name and a JSON object of its arguments in this form, once for each call:\n{example}"
)


def put_tools_in_system_message(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]], call_format: str
) -> list[Message]:
    tool_lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = TOOLS_INTRODUCTION.replace("{tools}", tool_lines).replace("{example}", call_format)
    first = messages[0] if messages else {}
    if first.get("role") in ("system", "developer"):
        return [{**first, "content": join_contents("\n\n", first.get("content", ""), text)}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def with_calls_as_text(messages: Sequence[Message], call_format: str) -> list[Message]:
    return [
        _with_calls_in_content(message, call_format) if message.get("tool_calls") else message for message in messages
    ]


def fill_missing_descriptions(
    tools: Sequence[dict[str, Any]], *, tool: bool, parameters: bool
) -> Sequence[dict[str, Any]]:
    if not tool and not parameters:
        return tools
    described = []
    for one in tools:
        function = dict(one["function"])
        if tool and function.get("description") is None:
            function["description"] = ""
        schema = function.get("parameters")
        if parameters and isinstance(schema, dict) and isinstance(schema.get("properties"), dict):
            properties = {
                name: {"description": "", **entry} if isinstance(entry, dict) else entry
                for name, entry in schema["properties"].items()
            }
            function["parameters"] = {**schema, "properties": properties}
        described.append({**one, "function": function})
    return described


def with_results_as_text(messages: Sequence[Message]) -> list[Message]:
    """Merges consecutive results and a following user message into one user message, because templates may require
    alternating roles.
    """
    result: list[Message] = []
    open_results = False
    for message in messages:
        role, content = message["role"], message.get("content", "")
        if role == "tool":
            response = join_contents("", "<tool_response>\n", content, "\n</tool_response>")
            if open_results:
                result[-1] = {**result[-1], "content": join_contents("\n", result[-1]["content"], response)}
            else:
                result.append({"role": "user", "content": response})
        elif role == "user" and open_results:
            result[-1] = {**result[-1], "content": join_contents("\n", result[-1]["content"], content)}
        else:
            result.append(message)
        open_results = role == "tool"
    return result


def _with_calls_in_content(message: Message, call_format: str) -> Message:
    written = []
    for call in message["tool_calls"]:
        function = call.get("function") or {}
        arguments = function.get("arguments") or {}
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        call_text = (
            call_format
            if ARGUMENTS_PLACEHOLDER in call_format or KEYWORDS_PLACEHOLDER in call_format
            else HERMES_CALL_FORMAT
        )
        if KEYWORDS_PLACEHOLDER in call_text:
            pairs = arguments.items() if isinstance(arguments, dict) else ()
            text = ", ".join(f"{key}={value!r}" for key, value in pairs)
        call_text = call_text.replace(NAME_PLACEHOLDER, str(function.get("name")))
        written.append(call_text.replace(ARGUMENTS_PLACEHOLDER, text).replace(KEYWORDS_PLACEHOLDER, text))
    content = "\n".join(part for part in (message.get("content", ""), *written) if part)
    return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": content}
