from __future__ import annotations

import re

from quire.server.formats.call_forms.call_form_texts import CallFormTexts, non_space_atoms
from quire.server.formats.call_forms.slots import ID_SLOT, INDEX_SLOT, NAME_SLOT, SLOT_PATTERN, TAG
from quire.server.formats.tools.json_calls import JsonCallKeys, read_json_call
from quire.server.formats.tools.text_source import ParserSteps, TextSource
from quire.server.formats.tools.tool_call_sink import ToolCallSink
from quire.server.formats.tools.tool_parser import ToolsByName

CALL_NAME = re.compile(r"[\w.:-][\w.:/-]*")
EXTRA_CALL_SEPARATORS = (";", ",")
"""Models write these between calls, even if the template shows only one call."""
VALID_CALL_ID = re.compile(r"[\w.:-]{1,64}")


class CallFormReader:
    def __init__(self, form: CallFormTexts, source: TextSource, sink: ToolCallSink, tools: ToolsByName) -> None:
        self._form = form
        self._source = source
        self._sink = sink
        self._tools = tools

    def read_form_calls(self, marker: str) -> ParserSteps[bool]:
        form = self._form
        source = self._source
        sink = self._sink
        source.restore_place(0)
        if not form.has_distinct_marker and not marker and not (yield from source.take_ignoring_space(form.begin)):
            return False
        outside = bool(marker)
        for atom in non_space_atoms(form.begin) if marker else ():
            if (yield from source.take_after_space(atom)):
                outside = False
        head = form.head if marker else form.head.removeprefix(form.prompt_head)
        read = 0
        while (yield from self._read_call(head, outside=outside)):
            read += 1
            source.reset_taken("")
            if not sink.last_complete:
                return True
            head = form.head
            for atom in non_space_atoms(form.between) if form.allows_many else EXTRA_CALL_SEPARATORS:
                yield from source.take_after_space(atom)
        source.restore_place(0)
        if not read:
            source.take_text(len(marker))
            return False
        for atom in non_space_atoms(form.end + form.turn_end):
            yield from source.take_after_space(atom)
        return True

    def _read_call(self, head: str, *, outside: bool) -> ParserSteps[bool]:
        """`outside`: True if the tag that surrounds calls is missing."""
        form = self._form
        if form.json_keys is not None and (yield from self._read_json_call(form.json_keys, head)):
            return True
        prompt_head = form.prompt_head if head != form.head else ""
        heads = [other.removeprefix(prompt_head) for other in form.other_heads]
        heads += [] if form.json_keys is not None or (outside and head in form.unwrapped_heads) else [head]
        for one in sorted({*heads, *form.unwrapped_heads}, key=len, reverse=True):
            if (yield from self._read_call_parts(one, unwrapped=one in form.unwrapped_heads and one not in heads)):
                return True
        return False

    def _read_json_call(self, keys: JsonCallKeys, head: str) -> ParserSteps[bool]:
        form, source = self._form, self._source
        names = None if form.has_distinct_marker else self._tools
        place = source.save_place()
        outer = head[: head.index("{")]
        if not (yield from source.take_ignoring_space(outer)) and not (
            form.has_distinct_marker and (yield from source.peek_non_space_character()) == "{"
        ):
            return False
        if not (yield from read_json_call(source, self._sink, names, keys)):
            source.restore_place(place)
            return False
        yield from self._skip_literal(form.tail[form.tail.rindex("}") + 1 :])
        return True

    def _read_call_parts(self, head: str, *, unwrapped: bool) -> ParserSteps[bool]:
        """An `unwrapped` head may also occur in text, so it counts only if a tool's name and arguments follow it."""
        must_be_known = unwrapped or not self._form.has_distinct_marker
        form = self._form
        source = self._source
        sink = self._sink
        tools = self._tools
        place = source.save_place()
        slot_values = yield from self._read_head_slots(head, must_be_known=must_be_known)
        if slot_values is None:
            source.restore_place(place)
            return False
        id = slot_values.get(ID_SLOT, "")
        name = slot_values.get(NAME_SLOT, "")
        if form.named_ids:
            name = (id.rpartition(":")[0] or id).removeprefix("functions.")
        if CALL_NAME.fullmatch(name) is None or (must_be_known and name not in tools):
            source.restore_place(place)
            return False
        if not (yield from form.arguments.try_skip_space_before_arguments(source)):
            source.restore_place(place)
            return False
        tool, tail = tools.get(name), form.tail.replace(NAME_SLOT, name)
        if unwrapped and not (yield from form.arguments.is_argument_or_tail_next(source, tail)):
            source.restore_place(place)
            return False
        sink.open_call(name, id if VALID_CALL_ID.fullmatch(id) else "")
        if (
            yield from form.arguments.stream_arguments(source, sink, tool.parameters if tool is not None else {}, tail)
        ):
            sink.close_call()
            yield from self._skip_literal(tail)
        return True

    def _read_head_slots(self, head: str, *, must_be_known: bool) -> ParserSteps[dict[str, str] | None]:
        source = self._source
        slot_values: dict[str, str] = {}
        pieces = SLOT_PATTERN.split(head)
        for index, piece in enumerate(pieces):
            if piece == NAME_SLOT and must_be_known and not (yield from _may_be_tool_name(source, self._tools)):
                return None
            if SLOT_PATTERN.fullmatch(piece):
                value = yield from self._read_slot(pieces[index + 1])
                if value is None:
                    return None
                slot_values.setdefault(piece, value)
            elif piece.strip() and not (yield from source.take_ignoring_space(piece)):
                return None
        return slot_values

    def _read_slot(self, next_piece: str) -> ParserSteps[str | None]:
        form, source = self._form, self._source
        follows = re.findall(rf"{TAG.pattern}|\S+", next_piece)[:1]
        if not follows and next_piece:
            follows = [next_piece[0], *(one for one in form.texts_after_head_slot if len(one) > 1)]
        follows = follows or form.texts_after_head_slot
        yield from source.peek_non_space_character()
        source.take_text(len(source.text) - len(source.text.lstrip()))
        read = yield from source.take_through_first_literal((*follows, "{"))  # no name contains a brace
        if read is None or read[1] not in follows:
            return None
        source.give_back(read[1])
        return read[0].strip()

    def _skip_literal(self, literal: str) -> ParserSteps[None]:
        source = self._source
        for piece in SLOT_PATTERN.split(literal):
            if piece in (ID_SLOT, INDEX_SLOT):
                yield from source.take_through_first_literal(('"', "<", ",", "}"))
            for atom in non_space_atoms(piece):
                yield from source.take_after_space(atom)


def _may_be_tool_name(source: TextSource, tools: ToolsByName) -> ParserSteps[bool]:
    while True:
        text = source.text.lstrip()
        if any(text.startswith(name) for name in tools):
            return True
        if source.is_closed or not any(name.startswith(text) for name in tools):
            return False
        yield
