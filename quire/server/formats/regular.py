"""Grammars in Lark's syntax as regular expressions, where they are regular: no rule leads back to itself.

Only then can they hold a text that stands inside a JSON string, as the input of a custom tool does.
Syntax: lark-parser.readthedocs.io/en/stable/grammar.html.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.engine.errors import InvalidRequest

LONGEST = 1 << 16
"""Characters of a regular expression; rules that are written out again and again can make them many."""
DEEPEST = 100
"""Rules inside rules."""
COMMON = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": r"[+\-]?[0-9]+",
    "DECIMAL": r"([0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"([0-9]+[eE][+\-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+\-]?[0-9]+)?)",
    "NUMBER": r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+\-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+\-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+\-]?[0-9]+)?",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
}
"""Terminals of `%import common`."""
TOKEN = re.compile(
    r"""(?P<space>(?:\s|//[^\n]*)+)
    |(?P<range>"(?:[^"\\]|\\.)"\.\."(?:[^"\\]|\\.)")
    |(?P<string>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?:[^/\\\n]|\\.)+/[imslux]*)
    |(?P<name>[_a-zA-Z][_a-zA-Z0-9]*)
    |(?P<alias>->[ \t]*[_a-zA-Z]\w*)
    |(?P<times>~[ \t]*\d+(?:[ \t]*\.\.[ \t]*\d+)?)
    |(?P<mark>[|()\[\]?*+])""",
    re.VERBOSE,
)
RULE = re.compile(r"[?!]*([_a-zA-Z][_a-zA-Z0-9]*)(?:\.-?\d+)?[ \t]*:(.*)", re.DOTALL)
IMPORT = re.compile(r"%import[ \t]+common\.(\w+)(?:[ \t]*->[ \t]*(\w+))?[ \t]*")
IMPORTS = re.compile(r"%import[ \t]+common[ \t]*\(([\w, \t]*)\)[ \t]*")


def as_regex(grammar: str) -> str:
    """An expression, in the syntax of Rust's, that matches what the grammar's `start` does. Raises InvalidRequest for
    a grammar that is broken, or is not regular."""
    rules, terminals = _statements(grammar)
    if "start" not in rules:
        raise InvalidRequest("the grammar has no rule named start")
    return _Writer(rules, terminals).rule("start")


def _statements(grammar: str) -> tuple[dict[str, str], dict[str, str]]:
    """The rules' bodies, and the imported terminals' expressions, by name."""
    rules: dict[str, str] = {}
    terminals: dict[str, str] = {}
    # A rule goes on in lines that begin with white space or with a bar.
    for statement in re.split(r"\n(?![ \t]*\||[ \t]+\S)", grammar.replace("\r\n", "\n")):
        text = re.sub(r"^(?:[ \t]*//[^\n]*\n?)+", "", statement).strip()
        if not text:
            continue
        if found := IMPORT.fullmatch(text):
            terminals[found[2] or found[1]] = _common(found[1])
        elif found := IMPORTS.fullmatch(text):
            terminals |= {name: _common(name) for name in re.split(r"[, \t]+", found[1].strip()) if name}
        elif found := RULE.fullmatch(text):
            if found[1] in rules:
                raise InvalidRequest(f"the grammar has two rules named {found[1]}")
            rules[found[1]] = found[2]
        else:
            raise InvalidRequest(f"the grammar has a line that is not understood: {text[:80]}")
    return rules, terminals


def _common(name: str) -> str:
    if name not in COMMON:
        raise InvalidRequest(f"the grammar imports common.{name[:80]}, which is not known here")
    return COMMON[name]


@dataclass
class _Writer:
    rules: Mapping[str, str]
    terminals: Mapping[str, str]
    done: dict[str, str] = field(default_factory=dict)
    begun: list[str] = field(default_factory=list)
    """Rules on the way to the one that is being written."""

    def rule(self, name: str) -> str:
        if name in self.terminals:
            return f"(?:{self.terminals[name]})"
        if name in self.begun:
            raise InvalidRequest(f"the grammar is not regular, as its rule {name} leads back to itself")
        if len(self.begun) == DEEPEST:
            raise InvalidRequest("the grammar's rules are nested too deeply")
        if name not in self.rules:
            raise InvalidRequest(f"the grammar has no rule named {name[:80]}")
        if name not in self.done:
            self.begun.append(name)
            self.done[name] = f"(?:{self._body(name)})"
            self.begun.pop()
        return self.done[name]

    def _body(self, name: str) -> str:
        text, place = self.rules[name], 0
        written: list[str] = []
        closing: list[str] = []
        length = 0
        while place < len(text):
            found = TOKEN.match(text, place)
            if found is None:
                raise InvalidRequest(f"the grammar's rule {name} has what is not understood: {text[place:][:40]}")
            place = found.end()
            written.append(self._token(found, closing, name))
            length += len(written[-1])
            if length > LONGEST:
                raise InvalidRequest("the grammar is too long when its rules are written out")
        if closing:
            raise InvalidRequest(f"the grammar's rule {name} leaves a bracket open")
        return "".join(written)

    def _token(self, found: re.Match[str], closing: list[str], name: str) -> str:
        kind, text = found.lastgroup, found[0]
        if kind in ("space", "alias"):
            return ""
        if kind == "name":
            return self.rule(text)
        if kind == "string":
            flags, text = ("i", text[:-1]) if text.endswith("i") else ("", text)
            return f"(?{flags}:{escaped(_unescaped(text[1:-1]))})"
        if kind == "range":
            first, last = (escaped(_unescaped(part[1:-1])) for part in text.split(".."))
            return f"[{first}-{last}]"
        if kind == "regex":
            body, _, flags = text[1:].rpartition("/")
            body = body.replace("\\/", "/")
            return f"(?{flags.replace('l', '')}:{body})"
        if kind == "times":
            least, _, most = text[1:].replace(" ", "").partition("..")
            return f"{{{least},{most}}}" if most else f"{{{least}}}"
        if text in "([":
            closing.append(")" if text == "(" else "]")
            return "(?:"
        if text in ")]":
            if not closing or closing.pop() != text:
                raise InvalidRequest(f"the grammar's rule {name} closes a bracket that is not open")
            return ")" if text == ")" else ")?"
        return text


def _unescaped(text: str) -> str:
    """What stands in a string of the grammar: escapes as Python's."""
    try:
        return text.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError:
        raise InvalidRequest(f"the grammar has a string with a broken escape: {text[:40]}") from None


def escaped(text: str) -> str:
    """An expression, in the syntax of Rust's, of this text."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&\-~]", r"\\\g<0>", text)
