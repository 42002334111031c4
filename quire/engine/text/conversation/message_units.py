"""Splits conversations into units: single messages, or an assistant's calls with the results directly after them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Message = dict[str, Any]

RESULT_ROLES = ("tool", "function")
SYSTEM_ROLES = ("system", "developer")
MAX_COUNTED_CALLS = 3
"""Shapes do not distinguish higher numbers of calls."""

ContentKind = Literal["empty", "text", "parts"]
""""parts": a list of parts, with images."""
IdKind = Literal["short", "foreign", "missing"]
""""short": nine letters and digits, which all templates accept."""
ArgumentsKind = Literal["object", "text", "value"]
""""text": a string that is not JSON, or JSON of a string. "value": other JSON."""
ResultsKind = Literal["none", "whole", "reordered", "partial", "mixed", "unmatched"]
""""whole": one result per call, in order. "mixed": some results answer no call. "unmatched": no result answers a call.
"""


class UnitShape(NamedTuple):
    role: str
    content: ContentKind = "text"
    has_reasoning: bool = False
    num_calls: int = 0
    ids: IdKind = "short"
    arguments: ArgumentsKind = "object"
    results: ResultsKind = "none"
    result_content: ContentKind = "text"
    is_legacy: bool = False
    has_result_names: bool = True
    is_tool_description: bool = False


@dataclass(frozen=True, slots=True)
class MessageUnit:
    messages: tuple[Message, ...]
    index: int
    """Index of the first message; -1 if Quire added it."""
    is_tool_description: bool = False


def split_into_units(messages: Sequence[Message], first_index: int = 0) -> list[MessageUnit]:
    """`first_index` is -1 if the first message is a tool description that Quire added."""
    units: list[MessageUnit] = []
    place, count = 0, len(messages)
    while place < count:
        end = place + 1
        if has_calls(messages[place]):
            while end < count and messages[end].get("role") in RESULT_ROLES:
                end += 1
        units.append(
            MessageUnit(tuple(messages[place:end]), place + first_index, is_tool_description=place + first_index < 0)
        )
        place = end
    return units


def has_calls(message: Message) -> bool:
    return bool(message.get("tool_calls") or message.get("function_call"))


def message_calls(message: Message) -> list[dict[str, Any]]:
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, dict)]
    legacy = message.get("function_call")
    if not calls and isinstance(legacy, dict):
        calls = [{"type": "function", "function": legacy}]
    return calls


def tool_call_function(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    return function if isinstance(function, dict) else {}


def call_id(call: dict[str, Any]) -> str | None:
    return _call_id_or_none(call.get("id"))


def result_call_id(message: Message) -> str | None:
    return _call_id_or_none(message.get("tool_call_id"))


def _call_id_or_none(value: object) -> str | None:
    return str(value) if isinstance(value, str | int) and value != "" else None


def match_results_to_calls(unit: MessageUnit) -> list[int | None]:
    """Returns each result's call index, or None. If the result or all calls lack ids, the result answers the first open
    call, of the result's name if it has one.
    """
    calls = message_calls(unit.messages[0])
    known = {call_id(call): index for index, call in reversed(list(enumerate(calls))) if call_id(call) is not None}
    open_calls = list(range(len(calls)))
    matched: list[int | None] = []
    for result in unit.messages[1:]:
        id = result_call_id(result)
        index = known.get(id) if id is not None and known else None
        if id is None or not known:
            name = result.get("name")
            same = [each for each in open_calls if name in (None, tool_call_function(calls[each]).get("name"))]
            index = same[0] if same else None
        if index in open_calls:
            open_calls.remove(index)
            matched.append(index)
        else:
            matched.append(None)
    return matched


def unit_shape(unit: MessageUnit, *, text_arguments: bool = False) -> UnitShape:
    message = unit.messages[0]
    role = message.get("role", "")
    content = content_kind(message)
    if len(unit.messages) == 1 and role not in RESULT_ROLES and not has_calls(message):
        return UnitShape(
            role, content, bool(message.get("reasoning_content")), is_tool_description=unit.is_tool_description
        )
    results = unit.messages[1:] if has_calls(message) else unit.messages
    calls = message_calls(message)
    ids = [call_id(call) for call in calls] + [result_call_id(each) for each in results]
    as_text = text_arguments or not message.get("tool_calls")
    kinds = {arguments_kind(tool_call_function(call).get("arguments", {}), as_text) for call in calls}
    return UnitShape(
        role,
        content,
        bool(message.get("reasoning_content")),
        min(len(calls), MAX_COUNTED_CALLS),
        "missing" if None in ids else "short" if all(map(is_short_id, ids)) else "foreign",
        "text" if "text" in kinds else "value" if "value" in kinds else "object",
        _results_kind(unit) if calls else "none",
        "parts" if any(content_kind(each) == "parts" for each in results) else "text",
        any("function_call" in each or each.get("role") == "function" for each in unit.messages),
        all(each.get("name") for each in results),
        unit.is_tool_description,
    )


def _results_kind(unit: MessageUnit) -> ResultsKind:
    matched = match_results_to_calls(unit)
    if not matched:
        return "none"
    if None in matched:
        return "mixed" if any(index is not None for index in matched) else "unmatched"
    if len(matched) < len(message_calls(unit.messages[0])):
        return "partial"
    return "whole" if matched == sorted(matched, key=lambda index: index or 0) else "reordered"


def content_kind(message: Message) -> ContentKind:
    content = message.get("content")
    if isinstance(content, str) or not content:
        return "text" if content and not content.isspace() else "empty"
    return "parts"


def arguments_kind(arguments: object, text_arguments: bool = False) -> ArgumentsKind:
    if text_arguments and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return "text"
    if isinstance(arguments, dict):
        return "object"
    return "text" if isinstance(arguments, str) else "value"


def is_short_id(id: str | None) -> bool:
    return id is not None and len(id) == 9 and id.isascii() and id.isalnum()
