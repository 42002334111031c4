"""Reads a JSON object as models write them while it comes, and passes it on as JSON.

What has one meaning is mended: control characters in strings and escapes that JSON does not have, quotes and constants
of Python, bare words, commas and colons that are missing or too many, brackets that are not closed. Text that is JSON
is passed on as it is, character by character.
"""

from __future__ import annotations

import json
import re
from typing import Literal

CLOSING = {"{": "}", "[": "]"}
RUNS = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"[^\"'\\\x00-\x1f]+")}
"""Text of strings that stays as it is, by the quote that ends them."""
ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
SPACE = re.compile(r"(?:\s|\\[ntr])+")
"""Between values, models also write the escapes of white space."""
WORD = re.compile(r"[A-Za-z0-9+\-._$]+")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
LOOSE_NUMBER = re.compile(r"\+?(-?)(0|[1-9][0-9]*)?(?:\.([0-9]*))?((?:[eE][+-]?[0-9]+)?)")
CONSTANTS = {
    **{word: word for word in ("true", "false", "null")},
    **{"True": "true", "False": "false", "None": "null", "undefined": "null"},
    **{"NaN": "null", "Infinity": "null", "-Infinity": "null"},
}
"""What JSON has for words; null for those that it has nothing for."""


class MendedJson:
    """Reads one object. A token that is not complete is left until there is more."""

    def __init__(self) -> None:
        self._closing: list[str] = []
        self._open = dict.fromkeys(CLOSING.values(), 0)
        """How many of `_closing` are each bracket: brackets that close nothing may be many."""
        self._expected: Literal["value", "key", "colon", "end"] = "value"
        """What the text goes on with; "end": a comma, or what closes the object or list."""
        self._first = True
        """Nothing stands in the open object or list yet, or a comma that is not written before something follows."""
        self._comma = ""
        """A comma, with the white space behind it."""
        self._quote = ""
        """That of the string that is open."""
        self.done = False
        self.broken = False
        """The text goes on with what is no JSON."""

    def read(self, text: str, *, closed: bool) -> tuple[str, int]:
        """JSON of as much of the text as can be read, and how many characters that is. `closed`: no more will come."""
        written: list[str] = []
        place = 0
        while place < len(text) and not (self.done or self.broken):
            step = self._string(text, place, closed) if self._quote else self._token(text, place, closed)
            if step is None:
                break
            piece, place = step
            written.append(piece)
        return "".join(written), place

    def close(self) -> str:
        """What closes the object where its text is broken off; "" if a value is missing there."""
        if not self._closing or self._quote or not (self._expected == "end" or self._first):
            return ""
        self.done = True
        return "".join(reversed(self._closing))

    def _string(self, text: str, place: int, closed: bool) -> tuple[str, int] | None:
        run = RUNS[self._quote].match(text, place)
        if run is not None:
            return run[0], run.end()
        character = text[place]
        if character == self._quote:
            self._quote = ""
            self._value_read()
            return '"', place + 1
        if character != "\\":
            return json.dumps(character)[1:-1], place + 1
        escape = ESCAPE.match(text, place)
        if escape is not None:
            return escape[0], escape.end()
        begun = ESCAPE_BEGUN.match(text, place)
        if begun is not None and begun.end() == len(text):
            return ("", len(text)) if closed else None
        if text[place + 1] == "'":
            return "'", place + 2
        return "\\\\", place + 1

    def _token(self, text: str, place: int, closed: bool) -> tuple[str, int] | None:
        character = text[place]
        if not self._closing and character != "{":
            self.broken = not character.isspace()
            return ("" if self.broken else character, place + (not self.broken))
        space = SPACE.match(text, place)
        if space is not None:
            written = re.sub(r"\\[ntr]|[^\S \t\n\r]", " ", space[0])
            if not self._comma:
                return written, space.end()
            self._comma += written
            return "", space.end()
        if character == "\\" and place + 1 == len(text) and not closed:
            return None
        if character in "}]":
            return self._closed(character), place + 1
        if character == ",":
            return self._separated(), place + 1
        if character == ":" and self._expected == "colon":
            self._expected = "value"
            return ":", place + 1
        if character in "{[" and self._expected != "key":
            before = self._before_value()
            self._closing.append(CLOSING[character])
            self._open[CLOSING[character]] += 1
            self._expected, self._first = ("key" if character == "{" else "value"), True
            return before + character, place + 1
        if character in "\"'":
            before = self._before_value()
            self._quote = character
            return before + '"', place + 1
        word = WORD.match(text, place)
        if word is None:
            self.broken = True
            return "", place
        if word.end() == len(text) and not closed:
            return None
        before = self._before_value()
        written = json.dumps(word[0]) if self._expected == "key" else as_value(word[0])
        self._value_read()
        return before + written, word.end()

    def _before_value(self) -> str:
        """What is missing before a key or value."""
        before, self._comma, self._first = self._comma, "", False
        if self._expected == "end":
            before, self._expected = ", ", self._next_expected()
        elif self._expected == "colon":
            before, self._expected = ": ", "value"
        return before

    def _value_read(self) -> None:
        self._expected = "colon" if self._expected == "key" else "end"

    def _next_expected(self) -> Literal["key", "value"]:
        return "key" if self._closing[-1] == "}" else "value"

    def _missing_value(self) -> str:
        """A value that a key has none of."""
        if self._expected == "colon":
            return ": null"
        return " null" if self._expected == "value" and self._closing[-1] == "}" else ""

    def _separated(self) -> str:
        missing = self._missing_value()
        if self._expected == "end" or missing:
            self._comma, self._first = ",", True
            self._expected = self._next_expected()
        return missing

    def _closed(self, bracket: str) -> str:
        if not self._open[bracket]:
            return ""
        written = self._comma[1:] + self._missing_value()
        self._comma, self._first = "", False
        while (closing := self._closing.pop()) != bracket:
            self._open[closing] -= 1
            written += closing
        self._open[bracket] -= 1
        self._expected = "end"
        self.done = not self._closing
        return written + bracket


def as_value(word: str) -> str:
    """The JSON of a word outside strings: of a number that JSON does not have, such as 007, a string."""
    if word in CONSTANTS:
        return CONSTANTS[word]
    if NUMBER.fullmatch(word):
        return word
    loose = LOOSE_NUMBER.fullmatch(word)
    if loose is not None and (loose[2] or loose[3]):
        fraction = f".{loose[3]}" if loose[3] else ""
        return f"{loose[1]}{loose[2] or '0'}{fraction}{loose[4]}"
    return json.dumps(word)


def mended(text: str) -> str | None:
    """A whole text as JSON; None if it is no object, or cannot be mended."""
    reader = MendedJson()
    written, place = reader.read(text, closed=True)
    return written if reader.done and not text[place:].strip() else None
