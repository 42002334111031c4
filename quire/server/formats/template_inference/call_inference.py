"""Infers a template's form of tool calls, and verifies it by reading back other calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from quire.engine.text.conversation.chat_template import ChatRenderer
from quire.server.formats.call_forms.argument_forms import ArgumentsForm, JsonArguments
from quire.server.formats.call_forms.call_form import CallForm
from quire.server.formats.call_forms.call_form_texts import NAME_TAG_OPENING
from quire.server.formats.call_forms.slots import ARGUMENTS_SLOT, ID_SLOT, NAME_SLOT, TAG
from quire.server.formats.template_inference.argument_inference import find_arguments_region, infer_arguments_form
from quire.server.formats.template_inference.template_prober import (
    LONG_IDS,
    PROBE_KEYS,
    PROBE_NAMES,
    PROBE_VALUES,
    ProbeCall,
    TemplateInferenceError,
    TemplateProber,
    parse_json_or_none,
)
from quire.server.formats.template_inference.turn_inference import AssistantTurnForm, infer_turn_form
from quire.server.formats.template_inference.wrapping_inference import infer_wrapping
from quire.server.formats.tools.json_calls import JsonCallKeys
from quire.server.formats.tools.tool_parser import Tool, ToolFormat, ToolParser

FULL_ARGUMENTS = dict(zip(PROBE_KEYS, PROBE_VALUES, strict=True))
VERIFICATION_CALLS: tuple[tuple[ProbeCall, ...], ...] = (
    (ProbeCall("get_it", {}),),
    (ProbeCall("get_it", {"city": "Rö me\n<b> 'x'", "count": 3}),),
    (
        ProbeCall("get_it", {"city": "7", "on": True, "count": -2.5}),
        ProbeCall("set-x", {"deep": {"a": [1, {"b": "c"}]}}),
    ),
    (
        ProbeCall("set-x", {"deep": {"a": [False]}, "city": "a, b=c"}),
        ProbeCall("get_it", {}),
        ProbeCall("get_it", {"on": False}),
    ),
)
VERIFICATION_PROPERTIES = {
    "city": {"type": "string"},
    "count": {"type": "number"},
    "on": {"type": "boolean"},
    "deep": {"type": "object"},
}


def infer_call_form(renderer: ChatRenderer, turn: AssistantTurnForm | None = None) -> CallForm:
    """Raises TemplateInferenceError."""
    prober = TemplateProber(renderer)
    prober.learn_generation_prompt()
    turn = turn or infer_turn_form(prober)
    if not renderer.capabilities.shows_calls:
        raise TemplateInferenceError("it does not render calls in an assistant's turn")
    form = _infer_unverified_form(prober, turn)
    verify_form(form, prober, turn)
    return form


def _infer_unverified_form(prober: TemplateProber, turn: AssistantTurnForm) -> CallForm:
    one_turn = prober.render_assistant_turn([ProbeCall(PROBE_NAMES[0], FULL_ARGUMENTS)])
    if PROBE_NAMES[0] not in one_turn and ID_SLOT not in one_turn:
        raise TemplateInferenceError("it does not render calls in an assistant's turn")
    named_ids = PROBE_NAMES[0] not in one_turn
    arguments_text, arguments = _find_arguments_and_form(prober, one_turn)
    try:
        two_turn = prober.render_assistant_turn(
            [ProbeCall(PROBE_NAMES[0], FULL_ARGUMENTS), ProbeCall(PROBE_NAMES[1], FULL_ARGUMENTS)]
        )
        shows_both = two_turn.count(ID_SLOT) > 1 if named_ids else PROBE_NAMES[1] in two_turn
        two = _insert_slots(turn.extract_model_text(two_turn), arguments_text) if shows_both else None
    except TemplateInferenceError:
        two = None
    prober.named_ids = named_ids
    answer = turn.extract_model_text(one_turn)
    wrapping = infer_wrapping(
        turn.generation_prompt, _insert_slots(answer, arguments_text), two, turn.content_end + turn.end
    )
    head, prompt_head = wrapping.head, wrapping.prompt_head
    if not wrapping.allows_many and turn.repeats_generation_prompt:
        head, prompt_head = turn.generation_prompt.lstrip() + head, turn.generation_prompt.lstrip()
    return CallForm(
        unwrapped_heads=_heads_without_outer_tag(wrapping.begin, head),
        begin=wrapping.begin,
        head=head,
        arguments=arguments,
        tail=wrapping.tail,
        between=wrapping.between,
        end=wrapping.end,
        allows_many=wrapping.allows_many,
        prompt_head=prompt_head,
        turn_end=wrapping.turn_end,
        json_keys=_infer_json_keys(answer)
        if isinstance(arguments, JsonArguments) and "{" in wrapping.head and "}" in wrapping.tail
        else None,
        content_begin=turn.content_begin,
        content_end=turn.content_end,
        named_ids=named_ids,
        short_ids=_needs_short_ids(prober),
        first_index=wrapping.first_index,
    )


def _heads_without_outer_tag(begin: str, head: str) -> tuple[str, ...]:
    """Returns the head without the tag around one or all calls, which models may omit."""
    outer = TAG.match(head.lstrip())
    inner = head.lstrip()[outer.end() :].lstrip() if outer is not None else head if TAG.search(begin) else ""
    return (inner,) if NAME_TAG_OPENING.match(inner) else ()


def _find_arguments_and_form(prober: TemplateProber, turn: str) -> tuple[str, ArgumentsForm]:
    json_arguments = _find_json_arguments_and_form(turn)
    if json_arguments is not None:
        return json_arguments
    region = find_arguments_region(prober)
    return region.extract_arguments_text(turn), infer_arguments_form(prober, region)


def _insert_slots(answer: str, arguments_text: str) -> str:
    answer = answer.replace(arguments_text, ARGUMENTS_SLOT)
    for name in PROBE_NAMES:
        answer = answer.replace(name, NAME_SLOT)
    return answer


def _needs_short_ids(prober: TemplateProber) -> bool:
    long = TemplateProber(
        prober.renderer, ids=LONG_IDS, prompt_before=prober.prompt_before, generation_prompt=prober.generation_prompt
    )
    try:
        long.render_assistant_turn([ProbeCall(PROBE_NAMES[0], FULL_ARGUMENTS)])
    except TemplateInferenceError:
        return True
    return False


def _find_json_arguments_and_form(turn: str) -> tuple[str, ArgumentsForm] | None:
    for place, value, end in _find_json_values(turn):
        arguments_text = turn[place:end]
        sort = arguments_text.find(PROBE_KEYS[1]) < arguments_text.find(PROBE_KEYS[0])
        if value == FULL_ARGUMENTS:
            return arguments_text, JsonArguments(sort=sort, indented="\n" in arguments_text)
        if isinstance(value, str) and value[:1] == "{" and parse_json_or_none(value) == FULL_ARGUMENTS:
            return arguments_text, JsonArguments(sort=sort, is_json_string=True)
    return None


def _find_json_values(text: str) -> list[tuple[int, Any, int]]:
    decoder, values = json.JSONDecoder(), []
    for place, character in enumerate(text):
        if character in '{"':
            try:
                value, end = decoder.raw_decode(text, place)
            except ValueError:
                continue
            values.append((place, value, end))
    return values


def _infer_json_keys(answer: str) -> JsonCallKeys | None:
    def is_arguments(value: Any) -> bool:
        return value == FULL_ARGUMENTS or (isinstance(value, str) and parse_json_or_none(value) == FULL_ARGUMENTS)

    inner: dict[str, Any] | None = None
    for _, value, _ in reversed(_find_json_values(answer)):
        if not isinstance(value, dict):
            continue
        if inner is None and any(map(is_arguments, value.values())):
            inner = value
            names = [key for key, one in value.items() if one == PROBE_NAMES[0]]
            arguments = next(key for key, one in value.items() if is_arguments(one))
            if not names:
                return None
            more = tuple(key for key in value if key not in (*names, arguments))
            keys = JsonCallKeys(names[0], arguments, (*more, "type", "id"))
        elif inner is not None and inner in value.values():
            inside = next(key for key, one in value.items() if one == inner)
            more = tuple(key for key in value if key != inside)
            keys = JsonCallKeys(keys.name, keys.arguments, (*keys.other_keys, *more), inside)
    return keys if inner is not None else None


def can_read_back(format: ToolFormat, renderer: ChatRenderer, turn: AssistantTurnForm) -> bool:
    """Tests only turns with a single call."""
    prober = TemplateProber(renderer)
    try:
        prober.learn_generation_prompt()
        return all(_find_mismatch(format, prober, turn, calls[:1]) is None for calls in VERIFICATION_CALLS)
    except TemplateInferenceError:
        return False


def verify_form(form: CallForm, prober: TemplateProber, turn: AssistantTurnForm) -> None:
    """Parses other rendered calls, whole and character by character. Raises TemplateInferenceError if they differ."""
    for calls in VERIFICATION_CALLS:
        mismatch = _find_mismatch(form, prober, turn, calls if form.allows_many else calls[:1])
        if mismatch is not None:
            raise TemplateInferenceError(f"its calls are not read back: {mismatch}")


def _find_mismatch(
    format: ToolFormat, prober: TemplateProber, turn: AssistantTurnForm, calls: Sequence[ProbeCall]
) -> str | None:
    tools = {
        name: Tool(name, {"type": "object", "properties": VERIFICATION_PROPERTIES}) for name in ("get_it", "set-x")
    }
    answer = turn.extract_model_text(prober.render_assistant_turn(calls))
    expected = [(call.name, call.arguments) for call in calls]
    for pieces in ([answer], list(answer)):
        content, parsed_calls = parse_answer_pieces(format, tools, pieces)
        if parsed_calls != expected or content.strip():
            return f"{answer!r} as {parsed_calls}"
    return None


def parse_answer_pieces(
    format: ToolFormat, tools: dict[str, Tool], pieces: Sequence[str]
) -> tuple[str, list[tuple[str, Any]]]:
    parser = ToolParser(format, tools)
    content, call_pieces = "", list[list[str]]()
    for index, piece in enumerate(pieces):
        more, deltas = parser.extract_tool_calls(piece, final=index == len(pieces) - 1)
        content += more
        for delta in deltas:
            if delta.name is not None:
                call_pieces.append([delta.name, ""])
            call_pieces[-1][1] += delta.arguments
    return content, [(name, parse_json_or_none(arguments)) for name, arguments in call_pieces]
