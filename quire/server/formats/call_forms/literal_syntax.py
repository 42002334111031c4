from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

from quire.server.formats.tools import strict_json
from quire.server.formats.tools.text_source import ParserSteps, TextSource, partial_match_length

BARE_WORD = re.compile(r"[^\s,:;=/\[\](){}\"'<>]*")
CONSTANT_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None, "none": None}
MAX_DEPTH = 100
ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|(?s:.))")
ESCAPE_VALUES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


class UnreadableLiteral(Exception): ...


@dataclass(frozen=True, slots=True)
class LiteralSyntax:
    quote: str = '"'
    raw: bool = False
    string_end_pattern: str = r"\s*[,\])}]"
    """Must follow a raw string's closing quote, because the string may contain its own quote."""

    def parse_next_literal(self, source: TextSource, depth: int = 0) -> ParserSteps[Any]:
        """Raises UnreadableLiteral."""
        first = yield from source.peek_non_space_character()
        if depth > MAX_DEPTH or not first:
            raise UnreadableLiteral
        if (yield from source.take_after_space(self.quote)):
            return (
                yield from self.parse_string_after_quote(
                    source, self.quote, raw=self.raw and (len(self.quote) > 1 or not depth)
                )
            )
        if first in "\"'" and (yield from source.take_after_space(first)):
            return (yield from self.parse_string_after_quote(source, first, raw=False))
        if first in "[(":
            return (yield from self._read_items(source, first, depth))
        if first == "{":
            return (yield from self._read_entries(source, depth))
        return (yield from _read_word(source))

    def parse_string_after_quote(self, source: TextSource, quote: str, *, raw: bool) -> ParserSteps[str]:
        """Raises UnreadableLiteral if the closing quote is missing."""
        pieces: list[str] = []
        while True:
            place = source.text.find(quote)
            if place < 0:
                if source.is_closed:
                    raise UnreadableLiteral
                pieces.append(source.take_text(len(source.text) - partial_match_length(source.text, (quote,))))
                yield
                continue
            pieces.append(source.take_text(place))
            so_far = "".join(pieces)
            pieces = [so_far]
            source.take_text(len(quote))
            inside = not raw and (len(so_far) - len(so_far.rstrip("\\"))) % 2 == 1
            if raw and len(quote) == 1:
                inside = not (yield from self._is_string_end(source))
            if not inside:
                return so_far if raw and not (len(quote) == 1 and "\\" + quote in so_far) else unescape_literal(so_far)
            pieces.append(quote)

    def _is_string_end(self, source: TextSource) -> ParserSteps[bool]:
        while len(source.text) < 80 and not source.is_closed and not re.match(self.string_end_pattern, source.text):
            yield
        return re.match(self.string_end_pattern, source.text) is not None

    def _read_items(self, source: TextSource, bracket: str, depth: int) -> ParserSteps[list[Any]]:
        close = "]" if bracket == "[" else ")"
        yield from source.take_after_space(bracket)
        items: list[Any] = []
        while not (yield from source.take_after_space(close)):
            if items and not (yield from source.take_after_space(",")):
                raise UnreadableLiteral
            if items and (yield from source.take_after_space(close)):
                break
            items.append((yield from self.parse_next_literal(source, depth + 1)))
        return items

    def _read_entries(self, source: TextSource, depth: int) -> ParserSteps[dict[str, Any]]:
        yield from source.take_after_space("{")
        entries: dict[str, Any] = {}
        has_entries = False
        while not (yield from source.take_after_space("}")):
            if has_entries and not (yield from source.take_after_space(",")):
                raise UnreadableLiteral
            if has_entries and (yield from source.take_after_space("}")):
                break
            has_entries = True
            key = yield from self.parse_next_key(source, (":", "="))
            if not ((yield from source.take_after_space(":")) or (yield from source.take_after_space("="))):
                raise UnreadableLiteral
            entries[key] = yield from self.parse_next_literal(source, depth + 1)
        return entries

    def parse_next_key(self, source: TextSource, ends: tuple[str, ...]) -> ParserSteps[str]:
        first = yield from source.peek_non_space_character()
        for quote in (self.quote, *"\"'"):
            if (yield from source.take_after_space(quote)):
                return (yield from self.parse_string_after_quote(source, quote, raw=len(quote) > 1))
        key_and_end = yield from source.take_through_first_literal(ends)
        if key_and_end is None or not first:
            raise UnreadableLiteral
        source.give_back(key_and_end[1])
        return key_and_end[0].strip()


def _read_word(source: TextSource) -> ParserSteps[Any]:
    while True:
        text = source.text.lstrip()
        match = BARE_WORD.match(text)
        assert match is not None
        if match.end() < len(text) or source.is_closed:
            break
        yield
    word = match[0]
    source.take_text(len(source.text) - len(text) + len(word))
    if word in CONSTANT_WORDS:
        return CONSTANT_WORDS[word]
    try:
        return strict_json.parse_json(word)
    except ValueError:
        pass
    try:
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise UnreadableLiteral from None
    if isinstance(value, int | float) and value == value and abs(value) != float("inf"):
        return value
    raise UnreadableLiteral


def unescape_literal(text: str) -> str:
    text = ESCAPE.sub(_unescape_match, text)
    return SURROGATE_PAIR.sub(lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), text)


def _unescape_match(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number < 0x110000 else match[0]
    return ESCAPE_VALUES.get(code, code if code in "\"'\\/" else match[0])
