from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from quire.engine.text.conversation.adaptation_rules import FILLER_TEXTS, AdaptationRule, Fix, opposite_role
from quire.engine.text.conversation.chat_messages import IMAGE_PART_TYPES, REASONING_FIELDS, Content, join_contents
from quire.engine.text.conversation.message_units import (
    Message,
    MessageUnit,
    call_id,
    match_results_to_calls,
    message_calls,
    result_call_id,
    tool_call_function,
)
from quire.engine.text.conversation.tool_prompt import with_calls_as_text, with_results_as_text

_ID_LENGTH = 9
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_NO_RESULT = "(no result)"
_RESULT_END = "</tool_response>"


class WrittenUnit(NamedTuple):
    messages: list[Message]
    num_replaced: int
    """Number of earlier messages that `messages` replace."""
    moved_texts: list[str]


class UnitWriter(NamedTuple):
    call_format: str
    text_arguments: bool

    def write_unit(self, unit: MessageUnit, rule: AdaptationRule, before: Sequence[Message]) -> WrittenUnit | None:
        """Returns None if the rule does not fit the unit."""
        messages, moved_texts = list(unit.messages), list[str]()
        for fix in rule.fixes:
            apply_fix = _FIX_FUNCTIONS[fix]
            changed = apply_fix(self, messages, unit)
            if fix in ("system", "user", "calls_as_text", "results_as_text", "arguments", "images"):
                moved_texts += [text for each in messages for text in _message_texts(each, calls=fix != "images")]
            messages = changed
        if not rule.join or not messages:
            return WrittenUnit(messages, 0, moved_texts)
        role = messages[0].get("role", "")
        if rule.join == "separated":
            if not before and role != "assistant":
                return None
            speaker = opposite_role(role)
            return WrittenUnit(
                [{"role": speaker, "content": FILLER_TEXTS[speaker][rule.filler_index]}, *messages], 0, moved_texts
            )
        if not before or before[-1].get("role") != role or before[-1].get("tool_calls"):
            return None
        return WrittenUnit([_merge_messages(before[-1], messages[0]), *messages[1:]], 1, moved_texts)


def _merge_messages(first: Message, second: Message) -> Message:
    before, behind = first.get("content", ""), second.get("content", "")
    results = isinstance(before, str) and before.endswith(_RESULT_END)
    merged = {**first, **second, "content": join_contents("\n" if results else "\n\n", before, behind)}
    thoughts = [each["reasoning_content"] for each in (first, second) if each.get("reasoning_content")]
    return {**merged, **dict.fromkeys(REASONING_FIELDS, "\n\n".join(thoughts))} if thoughts else merged


def _message_texts(message: Message, *, calls: bool) -> list[str]:
    content = message.get("content", "")
    texts = [content] if isinstance(content, str) else [part["text"] for part in content or () if "text" in part]
    for call in message_calls(message) if calls else ():
        arguments = tool_call_function(call).get("arguments")
        texts.append(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
    return [text for text in texts if text]


def _modernize_calls(writer: UnitWriter, messages: list[Message], unit: MessageUnit) -> list[Message]:
    modernized = []
    for place, message in enumerate(messages):
        if message.get("role") == "function":
            id = _make_short_id(f"{message.get('name')}", unit.index - (len(messages) == 1))
            message = {"tool_call_id": id, **message, "role": "tool"}
        elif place == 0 and "function_call" in message:
            calls = [_modernize_call(call, unit.index, writer) for call in message_calls(message)]
            message = {name: value for name, value in message.items() if name != "function_call"}
            message = {**message, "tool_calls": calls}
        modernized.append(message)
    return modernized


def _modernize_call(call: dict[str, Any], index: int, writer: UnitWriter) -> dict[str, Any]:
    function = tool_call_function(call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str) and not writer.text_arguments:
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    id = call_id(call) or _make_short_id(f"{function.get('name')}", index)
    return {**call, "id": id, "function": {**function, "arguments": arguments}}


def _make_short_id(text: str, index: int) -> str:
    number = int.from_bytes(hashlib.blake2b(f"{index}:{text}".encode(errors="replace"), digest_size=8).digest())
    digits = []
    for _ in range(_ID_LENGTH):
        number, digit = divmod(number, len(_DIGITS))
        digits.append(_DIGITS[digit])
    return "".join(digits)


def _with_short_ids(writer: UnitWriter, messages: list[Message], unit: MessageUnit) -> list[Message]:

    def shorten_id(id: str | None, place: int) -> str:
        if id is None:
            return _make_short_id("", unit.index + place)
        return id if len(id) == _ID_LENGTH and id.isascii() and id.isalnum() else _make_short_id(id, 0)

    return _rename_ids(messages, lambda id, place, name: shorten_id(id, place))


def _with_kimi_style_call_ids(writer: UnitWriter, messages: list[Message], unit: MessageUnit) -> list[Message]:
    """Kimi K2 reads the function's name from ids like `functions.name:3`."""
    return _rename_ids(messages, lambda id, place, name: f"functions.{name}:{unit.index + place}")


def _rename_ids(messages: list[Message], rename: Callable[[str | None, int, str], str]) -> list[Message]:
    calls = message_calls(messages[0])
    if not calls:
        return [{**each, "tool_call_id": rename(result_call_id(each), 0, str(each.get("name")))} for each in messages]
    names = [
        rename(call_id(call), place, str(tool_call_function(call).get("name"))) for place, call in enumerate(calls)
    ]
    renamed: list[Message] = [
        {**messages[0], "tool_calls": [{**call, "id": id} for call, id in zip(calls, names, strict=True)]}
    ]
    matched = match_results_to_calls(MessageUnit(tuple(messages), 0))
    for result, index in zip(messages[1:], matched, strict=True):
        id = names[index] if index is not None else rename(result_call_id(result), len(calls), str(result.get("name")))
        renamed.append({**result, "tool_call_id": id})
    return renamed


def _move_bad_arguments_to_content(writer: UnitWriter, messages: list[Message], unit: MessageUnit) -> list[Message]:
    calls, notes = [], []
    for call in message_calls(messages[0]):
        function = tool_call_function(call)
        arguments = function.get("arguments", {})
        if not _is_object(arguments, text_arguments=writer.text_arguments):
            sent = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            if arguments is not None and sent:
                notes.append(f"Arguments as they were written: {sent}")
            call = {**call, "function": {**function, "arguments": "{}" if writer.text_arguments else {}}}
        calls.append(call)
    content = join_contents("\n", messages[0].get("content", ""), *notes)
    return [{**messages[0], "content": content, "tool_calls": calls}, *messages[1:]]


def _is_object(arguments: Any, *, text_arguments: bool) -> bool:
    if text_arguments and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return False
    return isinstance(arguments, dict)


def _sort_results(writer: UnitWriter, messages: list[Message], unit: MessageUnit) -> list[Message]:
    matched = match_results_to_calls(MessageUnit(tuple(messages), 0))
    pairs = list(zip(matched, messages[1:], strict=True))
    pairs.sort(key=lambda pair: len(messages) if pair[0] is None else pair[0])
    return [messages[0], *(result for _, result in pairs)]


def _add_missing_results(writer: UnitWriter, messages: list[Message], unit: MessageUnit) -> list[Message]:
    calls, matched = message_calls(messages[0]), match_results_to_calls(MessageUnit(tuple(messages), 0))
    results = list(messages[1:])
    for index, call in enumerate(calls):
        if index not in matched:
            result = {"role": "tool", "name": tool_call_function(call).get("name"), "content": _NO_RESULT}
            results.append(result if call_id(call) is None else {**result, "tool_call_id": call_id(call)})
    return [messages[0], *results]


def _move_images_to_user(writer: UnitWriter, messages: list[Message], unit: MessageUnit) -> list[Message]:
    rewritten, images = [], list[dict[str, Any]]()
    for message in messages:
        content: Content = message.get("content", "")
        if message.get("role") == "tool" and not isinstance(content, str):
            images += [part for part in content if part.get("type") in IMAGE_PART_TYPES]
            texts = [part["text"] for part in content if part.get("type") not in IMAGE_PART_TYPES]
            message = {**message, "content": "\n".join(texts)}
        rewritten.append(message)
    introduction = {"type": "text", "text": "<tool_response>\n"}
    return [
        *rewritten,
        {"role": "user", "content": [introduction, *images, {"type": "text", "text": f"\n{_RESULT_END}"}]},
    ]


def _move_content_to_reasoning(writer: UnitWriter, messages: list[Message], unit: MessageUnit) -> list[Message]:
    message = messages[0]
    content = message.get("content", "")
    if not isinstance(content, str) or not content:
        return messages
    thought = dict.fromkeys(REASONING_FIELDS, f"{message.get('reasoning_content', '')}\n\n{content}")
    return [{**message, **thought, "content": ""}, *messages[1:]]


def _move_content_to_own_message(writer: UnitWriter, messages: list[Message], unit: MessageUnit) -> list[Message]:
    message = messages[0]
    if not message.get("content"):
        return messages
    return [{"role": "assistant", "content": message["content"]}, {**message, "content": ""}, *messages[1:]]


def _split_calls(writer: UnitWriter, messages: list[Message], unit: MessageUnit) -> list[Message]:
    place = next(index for index, message in enumerate(messages) if message.get("tool_calls"))
    before = messages[:place]
    message = messages[place]
    results = messages[place + 1 :]
    calls, matched = message_calls(message), match_results_to_calls(MessageUnit((message, *results), 0))
    bare = {name: value for name, value in message.items() if name not in REASONING_FIELDS} | {"content": ""}
    rewritten = list(before)
    for index, call in enumerate(calls):
        rewritten.append({**(bare if index else message), "tool_calls": [call]})
        rewritten += [result for result, answered in zip(results, matched, strict=True) if answered == index]
    return [*rewritten, *(result for result, answered in zip(results, matched, strict=True) if answered is None)]


def _to_system_role(writer: UnitWriter, messages: list[Message], unit: MessageUnit) -> list[Message]:
    return [{**message, "role": "system"} for message in messages]


def _to_tagged_user_messages(writer: UnitWriter, messages: list[Message], unit: MessageUnit) -> list[Message]:
    if unit.is_tool_description:
        return [{**message, "role": "user"} for message in messages]
    role = messages[0].get("role")
    return [
        {"role": "user", "content": join_contents("", f"<{role}>\n", message.get("content", ""), f"\n</{role}>")}
        for message in messages
    ]


_FixFunction = Callable[[UnitWriter, list[Message], MessageUnit], list[Message]]
_FIX_FUNCTIONS: dict[Fix, _FixFunction] = {
    "modern": _modernize_calls,
    "ids": _with_short_ids,
    "named_ids": _with_kimi_style_call_ids,
    "arguments": _move_bad_arguments_to_content,
    "order": _sort_results,
    "result": _add_missing_results,
    "images": _move_images_to_user,
    "thought": _move_content_to_reasoning,
    "apart": _move_content_to_own_message,
    "split": _split_calls,
    "calls_as_text": lambda writer, messages, unit: with_calls_as_text(messages, writer.call_format),
    "results_as_text": lambda writer, messages, unit: with_results_as_text(messages),
    "system": _to_system_role,
    "user": _to_tagged_user_messages,
    "omitted": lambda writer, messages, unit: [],
}
