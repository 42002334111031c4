"""Repairs a model's JSON object as it arrives, where the meaning is clear: control characters, invalid escapes,
Python's quotes and constants, bare words, wrong commas and colons, unclosed brackets.
"""

from __future__ import annotations

import json
import re
from typing import Literal

CLOSING_BRACKETS = {"{": "}", "[": "]"}
PLAIN_RUNS = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"[^\"'\\\x00-\x1f]+")}
JSON_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
PARTIAL_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
SPACE = re.compile(r"(?:\s|\\[ntr])+")
"""Models also write escaped whitespace between values."""
WORD = re.compile(r"[A-Za-z0-9+\-._$]+")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
LOOSE_NUMBER = re.compile(r"\+?(-?)(0|[1-9][0-9]*)?(?:\.([0-9]*))?((?:[eE][+-]?[0-9]+)?)")
JSON_BY_CONSTANT = {
    **{word: word for word in ("true", "false", "null")},
    "True": "true",
    "False": "false",
    "None": "null",
    "undefined": "null",
    "NaN": "null",
    "Infinity": "null",
    "-Infinity": "null",
}


class JsonRepairer:
    def __init__(self) -> None:
        self._open_closers: list[str] = []
        self._num_open = dict.fromkeys(CLOSING_BRACKETS.values(), 0)
        """Searching `_open_closers` for many stray brackets would be slow."""
        self._expected: Literal["value", "key", "colon", "end"] = "value"
        self._is_first = True
        """True if nothing follows the last open bracket or comma yet, so that the object or list may end here."""
        self._pending_comma = ""
        """The comma and the whitespace after it, which are written only if something follows."""
        self._quote = ""
        self.is_done = False
        self.is_broken = False

    def repair_piece(self, text: str, *, closed: bool) -> tuple[str, int]:
        written: list[str] = []
        place = 0
        while place < len(text) and not (self.is_done or self.is_broken):
            step = (
                self._read_string_piece(text, place, closed) if self._quote else self._read_token(text, place, closed)
            )
            if step is None:
                break
            piece, place = step
            written.append(piece)
        return "".join(written), place

    def close_brackets(self) -> str:
        if not self._open_closers or self._quote or not (self._expected == "end" or self._is_first):
            return ""
        self.is_done = True
        return "".join(reversed(self._open_closers))

    def _read_string_piece(self, text: str, place: int, closed: bool) -> tuple[str, int] | None:
        run = PLAIN_RUNS[self._quote].match(text, place)
        if run is not None:
            return run[0], run.end()
        character = text[place]
        if character == self._quote:
            self._quote = ""
            self._expect_after_key_or_value()
            return '"', place + 1
        if character != "\\":
            return json.dumps(character)[1:-1], place + 1
        escape = JSON_ESCAPE.match(text, place)
        if escape is not None:
            return escape[0], escape.end()
        partial_escape = PARTIAL_ESCAPE.match(text, place)
        if partial_escape is not None and partial_escape.end() == len(text):
            return ("", len(text)) if closed else None
        if text[place + 1] == "'":
            return "'", place + 2
        return "\\\\", place + 1

    def _read_token(self, text: str, place: int, closed: bool) -> tuple[str, int] | None:
        character = text[place]
        if not self._open_closers and character != "{":
            self.is_broken = not character.isspace()
            return ("" if self.is_broken else character, place + (not self.is_broken))
        space = SPACE.match(text, place)
        if space is not None:
            return self._write_space(space[0]), space.end()
        if character == "\\" and place + 1 == len(text) and not closed:
            return None
        if character in "}]":
            return self._close_bracket(character), place + 1
        if character == ",":
            return self._read_comma(), place + 1
        if character == ":" and self._expected == "colon":
            self._expected = "value"
            return ":", place + 1
        if character in "{[" and not self._is_key_next():
            before = self._write_missing_separator()
            self._open_closers.append(CLOSING_BRACKETS[character])
            self._num_open[CLOSING_BRACKETS[character]] += 1
            self._expected, self._is_first = ("key" if character == "{" else "value"), True
            return before + character, place + 1
        if character in "\"'":
            before = self._write_missing_separator()
            self._quote = character
            return before + '"', place + 1
        return self._read_word(text, place, closed)

    def _write_space(self, space: str) -> str:
        written = re.sub(r"\\[ntr]|[^\S \t\n\r]", " ", space)
        if not self._pending_comma:
            return written
        self._pending_comma += written
        return ""

    def _read_word(self, text: str, place: int, closed: bool) -> tuple[str, int] | None:
        word = WORD.match(text, place)
        if word is None:
            self.is_broken = True
            return "", place
        if word.end() == len(text) and not closed:
            return None
        before = self._write_missing_separator()
        written = json.dumps(word[0]) if self._expected == "key" else repair_word(word[0])
        self._expect_after_key_or_value()
        return before + written, word.end()

    def _write_missing_separator(self) -> str:
        before = self._pending_comma
        self._pending_comma = ""
        self._is_first = False
        if self._expected == "end":
            before, self._expected = ", ", self._next_expected()
        elif self._expected == "colon":
            before, self._expected = ": ", "value"
        return before

    def _expect_after_key_or_value(self) -> None:
        self._expected = "colon" if self._expected == "key" else "end"

    def _next_expected(self) -> Literal["key", "value"]:
        return "key" if self._open_closers[-1] == "}" else "value"

    def _is_key_next(self) -> bool:
        return self._expected == "key" or (self._expected == "end" and self._next_expected() == "key")

    def _missing_value(self) -> str:
        if self._expected == "colon":
            return ": null"
        return " null" if self._expected == "value" and self._open_closers[-1] == "}" else ""

    def _read_comma(self) -> str:
        missing = self._missing_value()
        if self._expected == "end" or missing:
            self._pending_comma, self._is_first = ",", True
            self._expected = self._next_expected()
        return missing

    def _close_bracket(self, bracket: str) -> str:
        if not self._num_open[bracket]:
            return ""
        written = self._pending_comma[1:] + self._missing_value()
        self._pending_comma, self._is_first = "", False
        while (closing := self._open_closers.pop()) != bracket:
            self._num_open[closing] -= 1
            written += closing
        self._num_open[bracket] -= 1
        self._expected = "end"
        self.is_done = not self._open_closers
        return written + bracket


def repair_word(word: str) -> str:
    if word in JSON_BY_CONSTANT:
        return JSON_BY_CONSTANT[word]
    if NUMBER.fullmatch(word):
        return word
    loose = LOOSE_NUMBER.fullmatch(word)
    if loose is not None and (loose[2] or loose[3]):
        fraction = f".{loose[3]}" if loose[3] else ""
        return f"{loose[1]}{loose[2] or '0'}{fraction}{loose[4]}"
    return json.dumps(word)


def repair_json(text: str) -> str | None:
    """Returns None if the text is not an object or cannot be repaired."""
    reader = JsonRepairer()
    written, place = reader.repair_piece(text, closed=True)
    return written if reader.is_done and not text[place:].strip() else None
