from __future__ import annotations

import re

from quire.server.protocol.tools import CUSTOM_INPUT_ARGUMENT

_INPUT_OPENING = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT_ARGUMENT}"\s*:\s*"')
_PLAIN_TEXT = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|([^u]))", re.DOTALL)
_PARTIAL_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?$")
_SHORT_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


class CustomInputDecoder:
    """Extracts a custom tool's input from arguments {"input": "…"} as they arrive."""

    def __init__(self) -> None:
        self._unread = ""
        self._is_inside = self._has_ended = False
        self._high_surrogate = ""

    def decode_arguments(self, piece: str, final: bool = False) -> str:
        self._unread += piece
        if not self._is_inside:
            opening = _INPUT_OPENING.match(self._unread)
            if opening is None:
                if not final:
                    return ""
                raw, self._unread = self._unread, ""
                return raw
            self._is_inside, self._unread = True, self._unread[opening.end() :]
        decoded = []
        at = 0
        text = self._unread
        while at < len(text) and not self._has_ended:
            if text[at] == '"':
                self._has_ended = True
            elif plain := _PLAIN_TEXT.match(text, at):
                decoded.append(plain[0])
                at = plain.end()
            elif escape := _ESCAPE.match(text, at):
                decoded.append(
                    self._decode_code_unit(int(escape[1], 16))
                    if escape[1]
                    else _SHORT_ESCAPES.get(escape[2], escape[2])
                )
                at = escape.end()
            elif _PARTIAL_ESCAPE.match(text, at):
                break
            else:
                decoded.append(text[at])
                at += 1
        self._unread = text[at:]
        return "".join(decoded)

    def _decode_code_unit(self, code: int) -> str:
        """The first half of a surrogate pair is kept until the second half comes."""
        if 0xD800 <= code < 0xDC00:
            self._high_surrogate = chr(code)
            return ""
        if 0xDC00 <= code < 0xE000:
            pair, self._high_surrogate = self._high_surrogate + chr(code), ""
            return pair.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return chr(code)


def decode_custom_input(arguments: str) -> str:
    return CustomInputDecoder().decode_arguments(arguments, final=True)
