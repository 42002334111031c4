"""Reads calls written as JSON objects, and passes on their arguments while they come."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quire.server.formats.tools import strict_json
from quire.server.formats.tools.mended_json import MendedJson, mended
from quire.server.formats.tools.sink import Sink
from quire.server.formats.tools.source import Source, Steps

FIRST_KEY = re.compile(r"""\s*\{\s*(?:"((?:[^"\\]|\\.)*)"|'([^'\\]*)')""")
PLAIN = frozenset('{}[]:,"+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ \t\n\r')
"""All characters that JSON has outside strings."""
CLOSING = {"{": "}", "[": "]", "(": ")"}


@dataclass(frozen=True)
class JsonKeys:
    """How the object of a call names its parts."""

    name: str = "name"
    arguments: str = "arguments"
    more: tuple[str, ...] = ("type", "id")
    """Keys of its other parts."""
    inside: str = ""
    """If name and arguments stand in an object inside the call's: the key of that."""

    @property
    def first(self) -> frozenset[str]:
        """The keys that a call may begin with. An object that begins with another is content, and is not held back."""
        return frozenset({self.name, self.arguments, "name", "arguments", "parameters", *self.more, self.inside})

    @cached_property
    def head(self) -> re.Pattern[str]:
        """A call up to its arguments, with the keys in the usual order: its arguments can be passed on as they come."""
        more = "|".join(map(re.escape, self.more)) or "type"
        skipped = rf'(?:"(?:{more})"\s*:\s*(?:"(?:[^"\\]|\\.)*"|\d+)\s*,\s*)*'
        inner = rf'"{re.escape(self.inside)}"\s*:\s*\{{\s*' if self.inside else ""
        name, arguments = re.escape(self.name), re.escape(self.arguments)
        return re.compile(
            rf'\s*\{{\s*{skipped}{inner}{skipped}"(?:{name}|name)"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
            rf'\s*"(?:{arguments}|arguments|parameters)"\s*:\s*'
        )

    @property
    def depth(self) -> int:
        """How many objects are open where the arguments have begun."""
        return 3 if self.inside else 2

    def parts(self, call: dict[str, Any]) -> tuple[Any, Any]:
        """The name and the arguments of a whole call."""
        inner = call.get(self.inside, call)
        if not isinstance(inner, dict):
            return None, None
        name = inner.get(self.name, inner.get("name"))
        return name, inner.get(self.arguments, inner.get("arguments", inner.get("parameters")))


USUAL = JsonKeys()


class Scanner:
    """Follows brackets and strings, to find the end of what they are around or the character that breaks it."""

    def __init__(self, open_brackets: str = "", *, quotes: str = '"', outside: frozenset[str] | None = PLAIN) -> None:
        """Of a JSON object, whose first brackets may have been read; with other quotes, or any characters `outside` of
        strings, of other literals."""
        self._expected = [CLOSING[bracket] for bracket in open_brackets]
        self._begun = bool(open_brackets)
        self._quotes, self._outside = quotes, outside
        self._quote = ""
        """That of the string that is open."""
        self._escaped = False
        self.done = False
        self.broken = False

    @property
    def depth(self) -> int:
        return len(self._expected)

    def scan(self, text: str, start: int = 0, stop_depth: int | None = None) -> int:
        """Read from `start` to the end of the object, the character that breaks it, or where stop_depth is reached.

        Gives the index of the first character not read.
        """
        for position in range(start, len(text)):
            depth = self.depth
            self._read(text[position])
            if self.broken:
                return position
            if self.done or (stop_depth == self.depth and depth < self.depth):
                return position + 1
        return len(text)

    def _read(self, character: str) -> None:
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == self._quote:
                self._quote = ""
        elif not self._begun and character != "{":
            self.broken = not character.isspace()
        elif self._outside is not None and character not in self._outside:
            self.broken = True
        elif character in self._quotes:
            self._quote = character
        elif character in CLOSING:
            self._begun = True
            self._expected.append(CLOSING[character])
        elif character in "}])":
            if self._expected[-1] == character:
                self._expected.pop()
                self.done = not self._expected
            else:
                self.broken = True


def read_arguments(source: Source, sink: Sink) -> Steps[bool]:
    """Pass on the JSON object that comes next as the open call's arguments, and close the call at its end.

    False: the call is left open, because the text ends early or goes on with what cannot be mended.
    """
    reader = MendedJson()
    while True:
        written, count = reader.read(source.text, closed=source.closed)
        source.take(count)
        ended = reader.broken or (source.closed and source.complete and not reader.done)
        sink.arguments(written + (reader.close() if ended else ""))
        if reader.done:
            sink.close()
        if reader.done or reader.broken or source.closed:
            return reader.done
        yield


def read_call(source: Source, sink: Sink, names: Container[str] | None = None, keys: JsonKeys = USUAL) -> Steps[bool]:
    """Read a call {"name": …, "arguments": {…}}, or with "parameters", or with the keys given.

    False, with nothing taken, when something else comes, or a name that is not among `names`.
    """
    scanner = Scanner()
    position = 0
    depth = keys.depth
    while not (scanner.done or scanner.broken or scanner.depth == depth):
        position = scanner.scan(source.text, position, stop_depth=depth)
        first = FIRST_KEY.match(source.text)
        if first is not None and (first[1] or first[2]) not in keys.first:
            return False
        if source.closed and position == len(source.text):
            break
        if position == len(source.text) and not (scanner.done or scanner.depth == depth):
            yield
    head = keys.head.fullmatch(source.text[: position - 1]) if scanner.depth == depth else None
    if head is not None and source.text[position - 1] == "{":
        name = _decoded(head[1])
        if name is None or (names is not None and name not in names):
            return False
        sink.open(name)
        source.take(position - 1)
        yield from read_arguments(source, sink)
        yield from _take_rest(source, depth - 1)
        return True
    return (yield from _read_whole(source, sink, names, keys))


def _take_rest(source: Source, depth: int) -> Steps[None]:
    """Take the text between the arguments and the end of the call's object, which is `depth` objects deep."""
    scanner = Scanner("{" * depth)
    while True:
        source.take(scanner.scan(source.text))
        if scanner.done or scanner.broken or source.closed:
            return
        yield


def _read_whole(source: Source, sink: Sink, names: Container[str] | None, keys: JsonKeys) -> Steps[bool]:
    """Read a call with another order of keys, or with its arguments in a string. Waits for all of it."""
    reader, position, written = MendedJson(), 0, ""
    while True:
        more, count = reader.read(source.text[position:], closed=source.closed)
        written, position = written + more, position + count
        if reader.done or reader.broken or source.closed:
            break
        yield
    call = _object(written) if reader.done else None
    name, arguments = (None, None) if call is None else keys.parts(call)
    if not isinstance(name, str) or (names is not None and name not in names):
        return False
    if isinstance(arguments, str):
        arguments = mended(arguments) or arguments.strip() or "{}"
    else:
        arguments = strict_json.write({} if arguments is None else arguments)
    if not strict_json.writable(name + arguments):
        return False
    source.take(position)
    sink.call(name, arguments)
    return True


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = strict_json.parse(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _decoded(literal: str) -> str | None:
    try:
        name = str(strict_json.parse(literal))
    except ValueError:
        return None
    return name if strict_json.writable(name) else None
