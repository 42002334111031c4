from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from quire.engine.text.conversation.message_units import Message, MessageUnit, UnitShape

PROBE_KEY = "qkeyq"


class ProbeUnit(NamedTuple):
    unit: MessageUnit
    expected_texts: list[tuple[str, ...]]
    """At least one text of each entry must appear in the rendered text."""
    any_position: bool = False
    """True if the texts may appear anywhere, because some templates move the first system message."""
    argument_texts: frozenset[str] = frozenset()

    def without_expected_arguments(self) -> ProbeUnit:
        expected_texts = [texts for texts in self.expected_texts if not self.argument_texts & set(texts)]
        return self._replace(expected_texts=expected_texts, any_position=True)


def make_probe_unit(shape: UnitShape, serial: int, *, first: bool, text_arguments: bool) -> ProbeUnit:
    """`serial` must be unique in a conversation."""
    content = f"qz{serial}czq"
    message: Message = {"role": shape.role, "content": _make_content(shape.content, content)}
    if shape.has_reasoning:
        thought = f"qz{serial}hzq"
        message |= {"reasoning_content": thought, "thinking": thought, "reasoning": thought}
    expected_texts: list[tuple[str, ...]] = [] if shape.content == "empty" else [(content,)]
    if not shape.num_calls:
        if shape.role in ("tool", "function"):
            message["content"] = _make_content(shape.result_content, content)
            expected_texts = [(content,)]
            message |= _result_fields(shape, serial, 0)
        return ProbeUnit(
            MessageUnit((message,), serial, is_tool_description=shape.is_tool_description),
            expected_texts,
            first and shape.role in ("system", "developer"),
        )
    text_arguments = text_arguments or shape.is_legacy
    calls = [
        _make_call(shape, serial, call_index, text_arguments=text_arguments) for call_index in range(shape.num_calls)
    ]
    expected_texts += [
        (f"qz{serial}n{call_index}zq", _short_probe_id(serial, call_index)) for call_index in range(shape.num_calls)
    ]
    expected_texts += [(f"qz{serial}a{call_index}zq",) for call_index in range(shape.num_calls)]
    if shape.is_legacy:
        message["function_call"] = calls[0]["function"]
    else:
        message["tool_calls"] = calls
    results = []
    for call_index in _answered_call_indices(shape):
        text = f"qz{serial}r{call_index}zq"
        role = "function" if shape.is_legacy else "tool"
        result = {
            "role": role,
            "content": _make_content(shape.result_content, text),
            **_result_fields(shape, serial, call_index),
        }
        results.append(result)
        expected_texts.append((text,))
    arguments = frozenset(f"qz{serial}a{call_index}zq" for call_index in range(shape.num_calls))
    return ProbeUnit(MessageUnit((message, *results), serial), expected_texts, argument_texts=arguments)


def _answered_call_indices(shape: UnitShape) -> list[int]:
    places = list(range(shape.num_calls))
    if shape.results == "reordered":
        return places[::-1]
    if shape.results == "partial":
        return places[:-1]
    if shape.results == "mixed":
        return [*places, shape.num_calls]
    if shape.results == "unmatched":
        return [shape.num_calls]
    return places if shape.results == "whole" else []


def _make_content(kind: str, text: str) -> Any:
    if kind == "parts":
        return [{"type": "text", "text": text}, {"type": "image"}]
    return text if kind == "text" else ""


def _short_probe_id(serial: int, call_index: int) -> str:
    return f"q{serial % 10_000:04d}{call_index:04d}"


def _make_id_field(shape: UnitShape, serial: int, call_index: int) -> dict[str, str]:
    if shape.ids == "missing":
        return {}
    mark = _short_probe_id(serial, call_index)
    return {"id": mark if shape.ids == "short" else f"call_{mark}zq"}


def _make_call(shape: UnitShape, serial: int, call_index: int, *, text_arguments: bool) -> dict[str, Any]:
    value = f"qz{serial}a{call_index}zq"
    arguments: Any = {PROBE_KEY: value}
    if shape.arguments == "text":
        arguments = f'{{"{PROBE_KEY}": "{value}'
    elif shape.arguments == "value":
        arguments = [value]
    if text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    function = {"name": f"qz{serial}n{call_index}zq", "arguments": arguments}
    return {**_make_id_field(shape, serial, call_index), "type": "function", "function": function}


def _result_fields(shape: UnitShape, serial: int, call_index: int) -> dict[str, str]:
    id = {} if shape.is_legacy else _make_id_field(shape, serial, call_index)
    ids = {"tool_call_id": id["id"]} if id else {}
    return {**ids, "name": f"qz{serial}n{call_index}zq"} if shape.has_result_names or shape.is_legacy else ids


def shows_in_order(text: str, probe_units: Iterable[ProbeUnit]) -> bool:
    search_start = 0
    for each in probe_units:
        start = 0 if each.any_position else search_start
        end = search_start
        for texts in each.expected_texts:
            places = [position for one in texts if (position := text.find(one, start)) >= 0]
            if not places:
                return False
            end = end if each.any_position else max(end, min(places))
        search_start = end
    return True


def without_image_parts(messages: Sequence[Message]) -> list[Message]:
    return [
        {**each, "content": [part for part in each["content"] if part["type"] != "image"]}
        if isinstance(each.get("content"), list)
        else each
        for each in messages
    ]
