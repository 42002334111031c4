"""Reads values written as Python's or JSON's literals, or with other quotes around strings, while they come."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

from quire.server.formats.tools import strict_json
from quire.server.formats.tools.source import Source, Steps, held_back

WORD = re.compile(r"[^\s,:;=/\[\](){}\"'<>]*")
WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None, "none": None}
MAX_DEPTH = 100
ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|(?s:.))")
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
SURROGATES = re.compile("[\ud800-\udbff][\udc00-\udfff]")


class Unreadable(Exception):
    """The text is no literal."""


@dataclass(frozen=True, slots=True)
class Literals:
    """How literals are written."""

    quote: str = '"'
    """What stands around strings. Strings with " or ' in place of it are read too."""
    raw: bool = False
    """A quoted string has no escapes."""
    ends: str = r"\s*[,\])}]"
    """What follows a raw string whose quote may also stand inside it: a regular expression."""

    def read(self, source: Source, depth: int = 0) -> Steps[Any]:
        """The next value. Raises Unreadable."""
        first = yield from source.word()
        if depth > MAX_DEPTH or not first:
            raise Unreadable
        if (yield from source.follows(self.quote)):
            return (yield from self.string(source, self.quote, raw=self.raw and (len(self.quote) > 1 or not depth)))
        if first in "\"'" and (yield from source.follows(first)):
            return (yield from self.string(source, first, raw=False))
        if first in "[(":
            return (yield from self._items(source, first, depth))
        if first == "{":
            return (yield from self._entries(source, depth))
        return (yield from _word(source))

    def string(self, source: Source, quote: str, *, raw: bool) -> Steps[str]:
        """The rest of a string behind its quote."""
        pieces: list[str] = []
        while True:
            place = source.text.find(quote)
            if place < 0:
                if source.closed:
                    raise Unreadable
                pieces.append(source.take(len(source.text) - held_back(source.text, (quote,))))
                yield
                continue
            pieces.append(source.take(place))
            so_far = "".join(pieces)
            pieces = [so_far]
            source.take(len(quote))
            inside = not raw and (len(so_far) - len(so_far.rstrip("\\"))) % 2 == 1
            if raw and len(quote) == 1:
                inside = not (yield from self._ends(source))
            if not inside:
                return so_far if raw and not (len(quote) == 1 and "\\" + quote in so_far) else unescaped(so_far)
            pieces.append(quote)

    def _ends(self, source: Source) -> Steps[bool]:
        """Whether a raw string ends here, by what follows."""
        while len(source.text) < 80 and not source.closed and not re.match(self.ends, source.text):
            yield
        return re.match(self.ends, source.text) is not None

    def _items(self, source: Source, bracket: str, depth: int) -> Steps[list[Any]]:
        close = "]" if bracket == "[" else ")"
        yield from source.follows(bracket)
        items: list[Any] = []
        while not (yield from source.follows(close)):
            if items and not (yield from source.follows(",")):
                raise Unreadable
            if items and (yield from source.follows(close)):
                break
            items.append((yield from self.read(source, depth + 1)))
        return items

    def _entries(self, source: Source, depth: int) -> Steps[dict[str, Any]]:
        yield from source.follows("{")
        entries: dict[str, Any] = {}
        begun = False
        while not (yield from source.follows("}")):
            if begun and not (yield from source.follows(",")):
                raise Unreadable
            if begun and (yield from source.follows("}")):
                break
            begun = True
            key = yield from self.key(source, (":", "="))
            if not ((yield from source.follows(":")) or (yield from source.follows("="))):
                raise Unreadable
            entries[key] = yield from self.read(source, depth + 1)
        return entries

    def key(self, source: Source, ends: tuple[str, ...]) -> Steps[str]:
        """A key, in quotes or bare."""
        first = yield from source.word()
        for quote in (self.quote, *"\"'"):
            if (yield from source.follows(quote)):
                return (yield from self.string(source, quote, raw=len(quote) > 1))
        found = yield from source.until(ends)
        if found is None or not first:
            raise Unreadable
        source.give_back(found[1])
        return found[0].strip()


def _word(source: Source) -> Steps[Any]:
    """A number, a constant, or a bare word as a string."""
    while True:
        text = source.text.lstrip()
        match = WORD.match(text)
        assert match is not None
        if match.end() < len(text) or source.closed:
            break
        yield
    word = match[0]
    source.take(len(source.text) - len(text) + len(word))
    if word in WORDS:
        return WORDS[word]
    try:
        return strict_json.parse(word)
    except ValueError:
        pass
    try:
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise Unreadable from None
    if isinstance(value, int | float) and value == value and abs(value) != float("inf"):
        return value
    raise Unreadable


def unescaped(text: str) -> str:
    """A string with its escapes, of Python or JSON, replaced by what they mean."""
    text = ESCAPE.sub(_character, text)
    return SURROGATES.sub(lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), text)


def _character(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number < 0x110000 else match[0]
    return ESCAPED.get(code, code if code in "\"'\\/" else match[0])
