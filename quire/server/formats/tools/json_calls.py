from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quire.server.formats.tools import strict_json
from quire.server.formats.tools.json_repair import JsonRepairer, repair_json
from quire.server.formats.tools.text_source import ParserSteps, TextSource
from quire.server.formats.tools.tool_call_sink import ToolCallSink

FIRST_KEY = re.compile(r"""\s*\{\s*(?:"((?:[^"\\]|\\.)*)"|'([^'\\]*)')""")
PLAIN_CHARACTERS = frozenset('{}[]:,"+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ \t\n\r')
CLOSING_BRACKETS = {"{": "}", "[": "]", "(": ")"}


@dataclass(frozen=True)
class JsonCallKeys:
    name: str = "name"
    arguments: str = "arguments"
    other_keys: tuple[str, ...] = ("type", "id")
    inner_key: str = ""

    @property
    def possible_first_keys(self) -> frozenset[str]:
        """Objects that begin with another key are content, and are not held back."""
        return frozenset(
            {self.name, self.arguments, "name", "arguments", "parameters", *self.other_keys, self.inner_key}
        )

    @cached_property
    def head_pattern(self) -> re.Pattern[str]:
        """Arguments can be streamed only if the keys are in this order."""
        more = "|".join(map(re.escape, self.other_keys)) or "type"
        skipped = rf'(?:"(?:{more})"\s*:\s*(?:"(?:[^"\\]|\\.)*"|\d+)\s*,\s*)*'
        inner = rf'"{re.escape(self.inner_key)}"\s*:\s*\{{\s*' if self.inner_key else ""
        name, arguments = re.escape(self.name), re.escape(self.arguments)
        return re.compile(
            rf'\s*\{{\s*{skipped}{inner}{skipped}"(?:{name}|name)"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
            rf'\s*"(?:{arguments}|arguments|parameters)"\s*:\s*'
        )

    @property
    def arguments_depth(self) -> int:
        return 3 if self.inner_key else 2

    def name_and_arguments(self, call: dict[str, Any]) -> tuple[Any, Any]:
        inner = call.get(self.inner_key, call)
        if not isinstance(inner, dict):
            return None, None
        name = inner.get(self.name, inner.get("name"))
        return name, inner.get(self.arguments, inner.get("arguments", inner.get("parameters")))


DEFAULT_KEYS = JsonCallKeys()


class BracketScanner:
    def __init__(
        self, open_brackets: str = "", *, quotes: str = '"', outside: frozenset[str] | None = PLAIN_CHARACTERS
    ) -> None:
        """If `outside` is None, all characters are allowed outside of strings."""
        self._open_closers = [CLOSING_BRACKETS[bracket] for bracket in open_brackets]
        self._has_begun = bool(open_brackets)
        self._quote_characters, self._plain_characters = quotes, outside
        self._quote = ""
        self._is_escaped = False
        self.is_done = False
        self.is_broken = False

    @property
    def depth(self) -> int:
        return len(self._open_closers)

    def scan(self, text: str, start: int = 0, stop_depth: int | None = None) -> int:
        for position in range(start, len(text)):
            depth = self.depth
            if self._quote:
                self._read_string_character(text[position])
            else:
                self._read_plain_character(text[position])
            if self.is_broken:
                return position
            if self.is_done or (stop_depth == self.depth and depth < self.depth):
                return position + 1
        return len(text)

    def _read_string_character(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == self._quote:
            self._quote = ""

    def _read_plain_character(self, character: str) -> None:
        if not self._has_begun and character != "{":
            self.is_broken = not character.isspace()
        elif self._plain_characters is not None and character not in self._plain_characters:
            self.is_broken = True
        elif character in self._quote_characters:
            self._quote = character
        elif character in CLOSING_BRACKETS:
            self._has_begun = True
            self._open_closers.append(CLOSING_BRACKETS[character])
        elif character in "}])":
            if self._open_closers[-1] == character:
                self._open_closers.pop()
                self.is_done = not self._open_closers
            else:
                self.is_broken = True


def read_json_arguments(source: TextSource, sink: ToolCallSink) -> ParserSteps[bool]:
    """Returns False, and leaves the call open, if the text ends early or cannot be repaired."""
    reader = JsonRepairer()
    while True:
        written, count = reader.repair_piece(source.text, closed=source.is_closed)
        source.take_text(count)
        ended = reader.is_broken or (source.is_closed and source.is_ended_by_model and not reader.is_done)
        sink.add_arguments(written + (reader.close_brackets() if ended else ""))
        if reader.is_done:
            sink.close_call()
        if reader.is_done or reader.is_broken or source.is_closed:
            return reader.is_done
        yield


def read_json_call(
    source: TextSource, sink: ToolCallSink, names: Container[str] | None = None, keys: JsonCallKeys = DEFAULT_KEYS
) -> ParserSteps[bool]:
    """Reads a call like {"name": …, "arguments": {…}}. Consumes nothing if it returns False."""
    scanner = BracketScanner()
    position = 0
    depth = keys.arguments_depth
    while not (scanner.is_done or scanner.is_broken or scanner.depth == depth):
        position = scanner.scan(source.text, position, stop_depth=depth)
        first = FIRST_KEY.match(source.text)
        if first is not None and (first[1] or first[2]) not in keys.possible_first_keys:
            return False
        if source.is_closed and position == len(source.text):
            break
        if position == len(source.text) and not (scanner.is_done or scanner.depth == depth):
            yield
    head = keys.head_pattern.fullmatch(source.text[: position - 1]) if scanner.depth == depth else None
    if head is not None and source.text[position - 1] == "{":
        name = _parse_json_name(head[1])
        if name is None or (names is not None and name not in names):
            return False
        sink.open_call(name)
        source.take_text(position - 1)
        yield from read_json_arguments(source, sink)
        yield from _take_call_end(source, depth - 1)
        return True
    return (yield from _read_buffered_call(source, sink, names, keys))


def _take_call_end(source: TextSource, depth: int) -> ParserSteps[None]:
    scanner = BracketScanner("{" * depth)
    while True:
        source.take_text(scanner.scan(source.text))
        if scanner.is_done or scanner.is_broken or source.is_closed:
            return
        yield


def _read_buffered_call(
    source: TextSource, sink: ToolCallSink, names: Container[str] | None, keys: JsonCallKeys
) -> ParserSteps[bool]:
    """Reads calls with keys in another order or arguments in a string."""
    reader = JsonRepairer()
    position = 0
    written = ""
    while True:
        more, count = reader.repair_piece(source.text[position:], closed=source.is_closed)
        written, position = written + more, position + count
        if reader.is_done or reader.is_broken or source.is_closed:
            break
        yield
    call = _parse_object(written) if reader.is_done else None
    name, arguments = (None, None) if call is None else keys.name_and_arguments(call)
    if not isinstance(name, str) or (names is not None and name not in names):
        return False
    if isinstance(arguments, str):
        arguments = repair_json(arguments) or arguments.strip() or "{}"
    else:
        arguments = strict_json.write_json({} if arguments is None else arguments)
    if not strict_json.is_encodable(name + arguments):
        return False
    source.take_text(position)
    sink.add_call(name, arguments)
    return True


def _parse_object(text: str) -> dict[str, Any] | None:
    try:
        value = strict_json.parse_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _parse_json_name(literal: str) -> str | None:
    try:
        name = str(strict_json.parse_json(literal))
    except ValueError:
        return None
    return name if strict_json.is_encodable(name) else None
