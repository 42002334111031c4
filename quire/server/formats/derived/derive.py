"""Finds out a template's form of tool calls, and proves it by reading back calls that it was not made from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from quire.engine.text.chat_template import ChatRenderer
from quire.server.formats.derived.probes import (
    KEYS,
    LONG_IDS,
    NAMES,
    VALUES,
    Call,
    NotDerived,
    Prober,
    parsed,
)
from quire.server.formats.derived.turn import Turn, infer_turn
from quire.server.formats.derived.values import infer_arguments, region_of
from quire.server.formats.derived.wrapping import infer_wrapping
from quire.server.formats.forms.arguments import Arguments, JsonArguments
from quire.server.formats.forms.form import CallForm
from quire.server.formats.forms.form_texts import OPENING
from quire.server.formats.forms.slots import ARGUMENTS, ID, NAME, TAG
from quire.server.formats.tools.format import Tool, ToolFormat, ToolParser
from quire.server.formats.tools.json_calls import JsonKeys

FULL = dict(zip(KEYS, VALUES, strict=True))
UNSEEN: tuple[tuple[Call, ...], ...] = (
    (Call("get_it", {}),),
    (Call("get_it", {"city": "Rö me\n<b> 'x'", "count": 3}),),
    (Call("get_it", {"city": "7", "on": True, "count": -2.5}), Call("set-x", {"deep": {"a": [1, {"b": "c"}]}})),
    (Call("set-x", {"deep": {"a": [False]}, "city": "a, b=c"}), Call("get_it", {}), Call("get_it", {"on": False})),
)
PROPERTIES = {
    "city": {"type": "string"},
    "count": {"type": "number"},
    "on": {"type": "boolean"},
    "deep": {"type": "object"},
}


def derive_calls(renderer: ChatRenderer, turn: Turn | None = None) -> CallForm:
    """Raises NotDerived, which says why."""
    prober = Prober(renderer)
    prober.begin()
    turn = turn or infer_turn(prober)
    if not renderer.shows.calls:
        raise NotDerived("it does not show calls in an assistant's turn")
    form = _inferred(prober, turn)
    verify(form, prober, turn)
    return form


def _inferred(prober: Prober, turn: Turn) -> CallForm:
    one_turn = prober.turn([Call(NAMES[0], FULL)])
    if NAMES[0] not in one_turn and ID not in one_turn:
        raise NotDerived("it does not show calls in an assistant's turn")
    named_ids = NAMES[0] not in one_turn
    inside, arguments = _arguments(prober, one_turn)
    try:
        two_turn = prober.turn([Call(NAMES[0], FULL), Call(NAMES[1], FULL)])
        shown = two_turn.count(ID) > 1 if named_ids else NAMES[1] in two_turn
        two = _slotted(turn.answer(two_turn), inside) if shown else None
    except NotDerived:
        two = None
    prober.named_ids = named_ids
    answer = turn.answer(one_turn)
    found = infer_wrapping(turn.lead, _slotted(answer, inside), two, turn.content_end + turn.end)
    head, given = found.head, found.given
    if not found.many and turn.repeats:
        head, given = turn.lead.lstrip() + head, turn.lead.lstrip()
    return CallForm(
        inner_heads=_inner_heads(found.begin, head),
        begin=found.begin,
        head=head,
        arguments=arguments,
        tail=found.tail,
        between=found.between,
        end=found.end,
        many=found.many,
        given=given,
        turn_end=found.turn_end,
        keys=_keys(answer)
        if isinstance(arguments, JsonArguments) and "{" in found.head and "}" in found.tail
        else None,
        content_begin=turn.content_begin,
        content_end=turn.content_end,
        named_ids=named_ids,
        short_ids=_short_ids(prober),
        first_index=found.first_index,
    )


def _inner_heads(begin: str, head: str) -> tuple[str, ...]:
    """The head of a call without the tag around it, or around all calls, if it still has one."""
    outer = TAG.match(head.lstrip())
    inner = head.lstrip()[outer.end() :].lstrip() if outer is not None else head if TAG.search(begin) else ""
    return (inner,) if OPENING.match(inner) else ()


def _arguments(prober: Prober, turn: str) -> tuple[str, Arguments]:
    """The text of the arguments in a turn, and how it is written."""
    found = _json_arguments(turn)
    if found is not None:
        return found
    region = region_of(prober)
    return region.inside(turn), infer_arguments(prober, region)


def _slotted(answer: str, inside: str) -> str:
    answer = answer.replace(inside, ARGUMENTS)
    for name in NAMES:
        answer = answer.replace(name, NAME)
    return answer


def _short_ids(prober: Prober) -> bool:
    long = Prober(prober.renderer, ids=LONG_IDS, before=prober.before, lead=prober.lead)
    try:
        long.turn([Call(NAMES[0], FULL)])
    except NotDerived:
        return True
    return False


def _json_arguments(turn: str) -> tuple[str, Arguments] | None:
    """The text of the arguments if they are a JSON object, or one in a JSON string, and how it is written."""
    for place, value, end in _json_values(turn):
        written = turn[place:end]
        sort = written.find(KEYS[1]) < written.find(KEYS[0])
        if value == FULL:
            return written, JsonArguments(sort=sort, indented="\n" in written)
        if isinstance(value, str) and value[:1] == "{" and parsed(value) == FULL:
            return written, JsonArguments(sort=sort, in_string=True)
    return None


def _json_values(text: str) -> list[tuple[int, Any, int]]:
    """The JSON objects and strings in a text, with where they begin and end."""
    decoder, found = json.JSONDecoder(), []
    for place, character in enumerate(text):
        if character in '{"':
            try:
                value, end = decoder.raw_decode(text, place)
            except ValueError:
                continue
            found.append((place, value, end))
    return found


def _keys(answer: str) -> JsonKeys | None:
    """The keys of a call that is a JSON object; None if it is none, or names no name."""

    def is_arguments(value: Any) -> bool:
        return value == FULL or (isinstance(value, str) and parsed(value) == FULL)

    inner: dict[str, Any] | None = None
    for _, value, _ in reversed(_json_values(answer)):
        if not isinstance(value, dict):
            continue
        if inner is None and any(map(is_arguments, value.values())):
            inner = value
            names = [key for key, one in value.items() if one == NAMES[0]]
            arguments = next(key for key, one in value.items() if is_arguments(one))
            if not names:
                return None
            more = tuple(key for key in value if key not in (*names, arguments))
            keys = JsonKeys(names[0], arguments, (*more, "type", "id"))
        elif inner is not None and inner in value.values():
            inside = next(key for key, one in value.items() if one == inner)
            more = tuple(key for key in value if key != inside)
            keys = JsonKeys(keys.name, keys.arguments, (*keys.more, *more), inside)
    return keys if inner is not None else None


def reads_back(format: ToolFormat, renderer: ChatRenderer, turn: Turn) -> bool:
    """Whether a format reads the single calls that a template writes."""
    prober = Prober(renderer)
    try:
        prober.begin()
        return all(_read_back(format, prober, turn, calls[:1]) is None for calls in UNSEEN)
    except NotDerived:
        return False


def verify(form: CallForm, prober: Prober, turn: Turn) -> None:
    """Read back turns of calls that the form was not made from, whole and in pieces. Raises NotDerived."""
    for calls in UNSEEN:
        wrong = _read_back(form, prober, turn, calls if form.many else calls[:1])
        if wrong is not None:
            raise NotDerived(f"its calls are not read back: {wrong}")


def _read_back(format: ToolFormat, prober: Prober, turn: Turn, calls: Sequence[Call]) -> str | None:
    """What was read instead of the calls; None if all is well."""
    tools = {name: Tool(name, {"type": "object", "properties": PROPERTIES}) for name in ("get_it", "set-x")}
    answer = turn.answer(prober.turn(calls))
    expected = [(call.name, call.arguments) for call in calls]
    for pieces in ([answer], list(answer)):
        content, found = read_calls(format, tools, pieces)
        if found != expected or content.strip():
            return f"{answer!r} as {found}"
    return None


def read_calls(format: ToolFormat, tools: dict[str, Tool], pieces: Sequence[str]) -> tuple[str, list[tuple[str, Any]]]:
    """The content and the calls of an answer that comes in pieces."""
    parser = ToolParser(format, tools)
    content, found = "", list[list[str]]()
    for index, piece in enumerate(pieces):
        more, deltas = parser.push(piece, final=index == len(pieces) - 1)
        content += more
        for delta in deltas:
            if delta.name is not None:
                found.append([delta.name, ""])
            found[-1][1] += delta.arguments
    return content, [(name, parsed(arguments)) for name, arguments in found]
