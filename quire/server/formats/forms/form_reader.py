"""Reads calls that are written in a form, while their text comes."""

from __future__ import annotations

import re

from quire.server.formats.forms.form_texts import FormTexts, words
from quire.server.formats.forms.slots import ID, INDEX, NAME, SLOTS, TAG
from quire.server.formats.tools.format import Tools
from quire.server.formats.tools.json_calls import JsonKeys, read_call
from quire.server.formats.tools.sink import Sink
from quire.server.formats.tools.source import Source, Steps

CALL_NAME = re.compile(r"[\w.:-][\w.:/-]*")
SEPARATORS = (";", ",")
"""What models write between calls whose template shows one alone."""
WRITTEN_ID = re.compile(r"[\w.:-]{1,64}")


class FormReader:
    """Reads from one answer."""

    def __init__(self, form: FormTexts, source: Source, sink: Sink, tools: Tools) -> None:
        self._form = form
        self._source = source
        self._sink = sink
        self._tools = tools

    def read_calls(self, marker: str) -> Steps[bool]:
        """As ToolFormat.read_calls."""
        form, source, sink = self._form, self._source, self._sink
        source.back(0)
        if not form.strong and not marker and not (yield from source.loosely(form.begin)):
            return False
        outside = bool(marker)
        for atom in words(form.begin) if marker else ():
            if (yield from source.follows(atom)):
                outside = False
        head = form.head if marker else form.head.removeprefix(form.given)
        read = 0
        while (yield from self._read_call(head, outside=outside)):
            read += 1
            source.mark("")
            if not sink.last_complete:
                return True
            head = form.head
            for atom in words(form.between) if form.many else SEPARATORS:
                yield from source.follows(atom)
        source.back(0)
        if not read:
            source.take(len(marker))
            return False
        for atom in words(form.end + form.turn_end):
            yield from source.follows(atom)
        return True

    def _read_call(self, head: str, *, outside: bool) -> Steps[bool]:
        """`outside`: the tag around calls is missing."""
        form = self._form
        if form.keys is not None and (yield from self._read_object(form.keys, head)):
            return True
        given = form.given if head != form.head else ""
        heads = [other.removeprefix(given) for other in form.other_heads]
        heads += [] if form.keys is not None or (outside and head in form.inner_heads) else [head]
        for one in sorted({*heads, *form.inner_heads}, key=len, reverse=True):  # a short one fits where a long one does
            if (yield from self._read_parts(one, inner=one in form.inner_heads and one not in heads)):
                return True
        return False

    def _read_object(self, keys: JsonKeys, head: str) -> Steps[bool]:
        """Read a call that is a JSON object."""
        form, source = self._form, self._source
        names = None if form.strong else self._tools
        place = source.here()
        outer = head[: head.index("{")]
        if not (yield from source.loosely(outer)) and not (form.strong and (yield from source.word()) == "{"):
            return False
        if not (yield from read_call(source, self._sink, names, keys)):
            source.back(place)
            return False
        yield from self._skip(form.tail[form.tail.rindex("}") + 1 :])
        return True

    def _read_parts(self, head: str, *, inner: bool) -> Steps[bool]:
        """Read a call that begins with a head: an `inner` one may be spoken of, so the name must be a tool's, and
        arguments must follow."""
        known = inner or not self._form.strong
        form, source, sink, tools = self._form, self._source, self._sink, self._tools
        place = source.here()
        found: dict[str, str] = {}
        pieces = SLOTS.split(head)
        for index, piece in enumerate(pieces):
            if piece == NAME and known and not (yield from _may_name(source, tools)):
                source.back(place)
                return False
            if SLOTS.fullmatch(piece):
                follows = re.findall(rf"{TAG.pattern}|\S+", pieces[index + 1])[:1]
                if not follows and pieces[index + 1]:  # names have no white space, but may have what begins arguments
                    follows = [pieces[index + 1][0], *(one for one in form.after_head if len(one) > 1)]
                follows = follows or form.after_head
                yield from source.word()
                source.take(len(source.text) - len(source.text.lstrip()))
                read = yield from source.until((*follows, "{"))  # no name has a brace
                if read is None or read[1] not in follows:
                    source.back(place)
                    return False
                source.give_back(read[1])
                found.setdefault(piece, read[0].strip())
            elif piece.strip() and not (yield from source.loosely(piece)):
                source.back(place)
                return False
        name, id = found.get(NAME, ""), found.get(ID, "")
        if form.named_ids:
            name = (id.rpartition(":")[0] or id).removeprefix("functions.")
        if CALL_NAME.fullmatch(name) is None or (known and name not in tools):
            source.back(place)
            return False
        if not (yield from form.arguments.begin(source)):
            source.back(place)
            return False
        tool, tail = tools.get(name), form.tail.replace(NAME, name)
        if inner and not (yield from form.arguments.come(source, tail)):
            source.back(place)
            return False
        sink.open(name, id if WRITTEN_ID.fullmatch(id) else "")
        if (yield from form.arguments.read(source, sink, tool.parameters if tool is not None else {}, tail)):
            sink.close()
            yield from self._skip(tail)
        return True

    def _skip(self, literal: str) -> Steps[None]:
        """Pass over a literal, or as much of it as is there."""
        source = self._source
        for piece in SLOTS.split(literal):
            if piece in (ID, INDEX):
                yield from source.until(('"', "<", ",", "}"))
            for atom in words(piece):
                yield from source.follows(atom)


def _may_name(source: Source, tools: Tools) -> Steps[bool]:
    """Whether the text that comes may be the name of a tool: other text is not held back."""
    while True:
        text = source.text.lstrip()
        if any(text.startswith(name) for name in tools):
            return True
        if source.closed or not any(name.startswith(text) for name in tools):
            return False
        yield
