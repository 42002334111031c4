"""Reads calls written as JSON objects, and passes on their arguments while they come."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

from quire.server.formats.tools import strict_json
from quire.server.formats.tools.sink import Sink
from quire.server.formats.tools.source import Source, Steps

HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*'
)
"""A call up to its arguments, with the keys in the usual order: its arguments can be passed on as they come."""
FIRST_KEY = re.compile(r'\s*\{\s*"((?:[^"\\]|\\.)*)"')
KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})
"""The keys that a call may begin with. An object that begins with another is content, and is not held back."""
PLAIN = frozenset('{}[]:,"+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ \t\n\r')
"""All characters that JSON has outside strings."""
CLOSING = {"{": "}", "[": "]"}


class Scanner:
    """Follows the brackets and strings of a JSON object, to find its end or the character that breaks it."""

    def __init__(self, open_brackets: str = "") -> None:
        self._expected = [CLOSING[bracket] for bracket in open_brackets]
        self._begun = bool(open_brackets)
        self._in_string = False
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
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
        elif not self._begun and character != "{":
            self.broken = not character.isspace()
        elif character not in PLAIN:
            self.broken = True
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._begun = True
            self._expected.append(CLOSING[character])
        elif character in "}]":
            if self._expected[-1] == character:
                self._expected.pop()
                self.done = not self._expected
            else:
                self.broken = True


def read_arguments(source: Source, sink: Sink) -> Steps[None]:
    """Pass on the JSON object that comes next as the open call's arguments, and close the call at its end.

    The call is left open where the text ends early or has a character that breaks the JSON.
    """
    scanner = Scanner()
    while True:
        sink.arguments(source.take(scanner.scan(source.text)))
        if scanner.done:
            sink.close()
        if scanner.done or scanner.broken or source.closed:
            return
        yield


def read_call(source: Source, sink: Sink, names: Container[str] | None = None) -> Steps[bool]:
    """Read a call {"name": …, "arguments": {…}}, or with "parameters".

    False, with nothing taken, when something else comes, or a name that is not among `names`.
    """
    scanner = Scanner()
    position = 0
    while not (scanner.done or scanner.broken or scanner.depth == 2):
        position = scanner.scan(source.text, position, stop_depth=2)
        first = FIRST_KEY.match(source.text)
        if first is not None and first[1] not in KEYS:
            return False
        if source.closed and position == len(source.text):
            break
        if position == len(source.text) and not (scanner.done or scanner.depth == 2):
            yield
    head = HEAD.fullmatch(source.text[: position - 1]) if scanner.depth == 2 else None
    if head is not None and source.text[position - 1] == "{":
        name = _decoded(head[1])
        if name is None or (names is not None and name not in names):
            return False
        sink.open(name)
        source.take(position - 1)
        yield from read_arguments(source, sink)
        yield from _take_rest(source)
        return True
    return (yield from _read_whole(source, sink, names))


def _take_rest(source: Source) -> Steps[None]:
    """Take the text between the arguments and the end of the call's object."""
    scanner = Scanner("{")
    while True:
        source.take(scanner.scan(source.text))
        if scanner.done or scanner.broken or source.closed:
            return
        yield


def _read_whole(source: Source, sink: Sink, names: Container[str] | None) -> Steps[bool]:
    """Read a call with another order of keys, or with its arguments in a string. Waits for all of it."""
    scanner = Scanner()
    position = scanner.scan(source.text)
    while not (scanner.done or scanner.broken or source.closed):
        yield
        position = scanner.scan(source.text, position)
    call = _object(source.text[:position]) if scanner.done else None
    name = None if call is None else call.get("name")
    if call is None or not isinstance(name, str) or (names is not None and name not in names):
        return False
    arguments = call.get("arguments", call.get("parameters"))
    if not isinstance(arguments, str):
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
