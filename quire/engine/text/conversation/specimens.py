"""Units of made-up texts, one for each shape, and whether a rendering shows them where they stand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from quire.engine.text.conversation.units import Message, Shape, Unit

PROBE_KEY = "qkeyq"


class Specimen(NamedTuple):
    unit: Unit
    wanted: list[tuple[str, ...]]
    """The texts that a rendering must show; of several in one entry one is enough."""
    anywhere: bool = False
    """The template may show it elsewhere, as some do with the first system message."""
    arguments: frozenset[str] = frozenset()
    """Those of the wanted texts that are arguments of calls."""

    def without_arguments(self) -> Specimen:
        wanted = [texts for texts in self.wanted if not self.arguments & set(texts)]
        return self._replace(wanted=wanted, anywhere=True)


def specimen(shape: Shape, serial: int, *, first: bool, text_arguments: bool) -> Specimen:
    """`serial`: no two units of a conversation have the same. `first`: it begins the conversation."""
    content = f"qz{serial}czq"
    message: Message = {"role": shape.role, "content": _content(shape.content, content)}
    if shape.reasoning:
        thought = f"qz{serial}hzq"
        message |= {"reasoning_content": thought, "thinking": thought, "reasoning": thought}
    wanted: list[tuple[str, ...]] = [] if shape.content == "empty" else [(content,)]
    if not shape.calls:
        if shape.role in ("tool", "function"):
            message["content"] = _content(shape.result_content, content)
            wanted = [(content,)]
            message |= _answering(shape, serial, 0)
        return Specimen(
            Unit((message,), serial, own=shape.own), wanted, first and shape.role in ("system", "developer")
        )
    text_arguments = text_arguments or shape.legacy
    calls = [_call(shape, serial, place, text_arguments=text_arguments) for place in range(shape.calls)]
    wanted += [(f"qz{serial}n{place}zq", _id_mark(serial, place)) for place in range(shape.calls)]
    wanted += [(f"qz{serial}a{place}zq",) for place in range(shape.calls)]
    if shape.legacy:
        message["function_call"] = calls[0]["function"]
    else:
        message["tool_calls"] = calls
    results = []
    for place in _answered(shape):
        text = f"qz{serial}r{place}zq"
        role = "function" if shape.legacy else "tool"
        result = {"role": role, "content": _content(shape.result_content, text), **_answering(shape, serial, place)}
        results.append(result)
        wanted.append((text,))
    arguments = frozenset(f"qz{serial}a{place}zq" for place in range(shape.calls))
    return Specimen(Unit((message, *results), serial), wanted, arguments=arguments)


def _answered(shape: Shape) -> list[int]:
    """The places of the calls that have results, in the order of these."""
    places = list(range(shape.calls))
    if shape.results == "reordered":
        return places[::-1]
    if shape.results == "partial":
        return places[:-1]
    if shape.results == "mixed":
        return [*places, shape.calls]
    if shape.results == "unmatched":
        return [shape.calls]
    return places if shape.results == "whole" else []


def _content(kind: str, text: str) -> Any:
    if kind == "parts":
        return [{"type": "text", "text": text}, {"type": "image"}]
    return text if kind == "text" else ""


def _id_mark(serial: int, place: int) -> str:
    return f"q{serial % 10_000:04d}{place:04d}"


def _id(shape: Shape, serial: int, place: int) -> dict[str, str]:
    if shape.ids == "missing":
        return {}
    mark = _id_mark(serial, place)
    return {"id": mark if shape.ids == "short" else f"call_{mark}zq"}


def _call(shape: Shape, serial: int, place: int, *, text_arguments: bool) -> dict[str, Any]:
    value = f"qz{serial}a{place}zq"
    arguments: Any = {PROBE_KEY: value}
    if shape.arguments == "text":
        arguments = f'{{"{PROBE_KEY}": "{value}'
    elif shape.arguments == "value":
        arguments = [value]
    if text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    function = {"name": f"qz{serial}n{place}zq", "arguments": arguments}
    return {**_id(shape, serial, place), "type": "function", "function": function}


def _answering(shape: Shape, serial: int, place: int) -> dict[str, str]:
    """Which call a result answers."""
    id = {} if shape.legacy else _id(shape, serial, place)
    ids = {"tool_call_id": id["id"]} if id else {}
    return {**ids, "name": f"qz{serial}n{place}zq"} if shape.named or shape.legacy else ids


def shown_in_order(text: str, specimens: Iterable[Specimen]) -> bool:
    """True if a rendering shows each specimen behind those before it."""
    place = 0
    for each in specimens:
        start = 0 if each.anywhere else place
        end = place
        for texts in each.wanted:
            places = [found for one in texts if (found := text.find(one, start)) >= 0]
            if not places:
                return False
            end = end if each.anywhere else max(end, min(places))
        place = end
    return True


def without_images(messages: Sequence[Message]) -> list[Message]:
    return [
        {**each, "content": [part for part in each["content"] if part["type"] != "image"]}
        if isinstance(each.get("content"), list)
        else each
        for each in messages
    ]
