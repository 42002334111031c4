"""A custom tool's input, extracted from the arguments of a call, {"input": "…"}, while they arrive."""

from __future__ import annotations

import re

from quire.server.protocol.tools import CUSTOM_INPUT

_OPENING = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|([^u]))", re.DOTALL)
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?$")
_SHORT = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


class CustomInput:
    """Takes the arguments piece by piece and returns the pieces of the input. Arguments of any other form are
    themselves the input."""

    def __init__(self) -> None:
        self._rest = ""
        """What was not read yet."""
        self._inside = self._ended = False
        self._high = ""
        """The first half of a surrogate pair."""

    def push(self, piece: str, final: bool = False) -> str:
        self._rest += piece
        if not self._inside:
            opening = _OPENING.match(self._rest)
            if opening is None:
                if not final:
                    return ""
                raw, self._rest = self._rest, ""
                return raw
            self._inside, self._rest = True, self._rest[opening.end() :]
        found, at, text = [], 0, self._rest
        while at < len(text) and not self._ended:
            if text[at] == '"':
                self._ended = True
            elif plain := _PLAIN.match(text, at):
                found.append(plain[0])
                at = plain.end()
            elif escape := _ESCAPE.match(text, at):
                found.append(self._unit(int(escape[1], 16)) if escape[1] else _SHORT.get(escape[2], escape[2]))
                at = escape.end()
            elif _BEGUN_ESCAPE.match(text, at):
                break
            else:  # a backslash that begins nothing
                found.append(text[at])
                at += 1
        self._rest = text[at:]
        return "".join(found)

    def _unit(self, code: int) -> str:
        """A code unit of UTF-16; the first half of a pair waits for the second."""
        if 0xD800 <= code < 0xDC00:
            self._high = chr(code)
            return ""
        if 0xDC00 <= code < 0xE000:
            pair, self._high = self._high + chr(code), ""
            return pair.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return chr(code)


def input_of(arguments: str) -> str:
    """The input that a call's arguments have."""
    return CustomInput().push(arguments, final=True)
