"""Converts Lark grammars without recursion to regular expressions, which can constrain text in a JSON string, such as a
custom tool's input. Syntax: lark-parser.readthedocs.io/en/stable/grammar.html.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.engine.common.errors import InvalidRequest

MAX_REGEX_LENGTH = 1 << 16
"""In characters. Repeated expansion of rules can produce many."""
MAX_RULE_DEPTH = 100
COMMON_TERMINALS = {
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
LARK_TOKEN = re.compile(
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
RULE_STATEMENT = re.compile(r"[?!]*([_a-zA-Z][_a-zA-Z0-9]*)(?:\.-?\d+)?[ \t]*:(.*)", re.DOTALL)
IMPORT_STATEMENT = re.compile(r"%import[ \t]+common\.(\w+)(?:[ \t]*->[ \t]*(\w+))?[ \t]*")
MULTI_IMPORT_STATEMENT = re.compile(r"%import[ \t]+common[ \t]*\(([\w, \t]*)\)[ \t]*")


def lark_to_regex(grammar: str) -> str:
    """Returns a regular expression in Rust's syntax. Raises InvalidRequest for a broken or non-regular grammar."""
    rules, terminals = _parse_statements(grammar)
    if "start" not in rules:
        raise InvalidRequest("the grammar has no rule named start")
    return _RegexWriter(rules, terminals).rule_regex("start")


def _parse_statements(grammar: str) -> tuple[dict[str, str], dict[str, str]]:
    rules: dict[str, str] = {}
    terminals: dict[str, str] = {}
    # A rule continues on lines that begin with whitespace or a bar.
    for statement in re.split(r"\n(?![ \t]*\||[ \t]+\S)", grammar.replace("\r\n", "\n")):
        text = re.sub(r"^(?:[ \t]*//[^\n]*\n?)+", "", statement).strip()
        if not text:
            continue
        if match := IMPORT_STATEMENT.fullmatch(text):
            terminals[match[2] or match[1]] = _common_terminal(match[1])
        elif match := MULTI_IMPORT_STATEMENT.fullmatch(text):
            terminals |= {name: _common_terminal(name) for name in re.split(r"[, \t]+", match[1].strip()) if name}
        elif match := RULE_STATEMENT.fullmatch(text):
            if match[1] in rules:
                raise InvalidRequest(f"the grammar has two rules named {match[1]}")
            rules[match[1]] = match[2]
        else:
            raise InvalidRequest(f"the grammar has a line that cannot be parsed: {text[:80]}")
    return rules, terminals


def _common_terminal(name: str) -> str:
    if name not in COMMON_TERMINALS:
        raise InvalidRequest(f"the grammar imports common.{name[:80]}, which is not supported")
    return COMMON_TERMINALS[name]


@dataclass
class _RegexWriter:
    rules: Mapping[str, str]
    terminals: Mapping[str, str]
    regex_by_rule: dict[str, str] = field(default_factory=dict)
    open_rules: list[str] = field(default_factory=list)

    def rule_regex(self, name: str) -> str:
        if name in self.terminals:
            return f"(?:{self.terminals[name]})"
        if name in self.open_rules:
            raise InvalidRequest(f"the grammar is not regular, because its rule {name} is recursive")
        if len(self.open_rules) == MAX_RULE_DEPTH:
            raise InvalidRequest("the grammar's rules are nested too deeply")
        if name not in self.rules:
            raise InvalidRequest(f"the grammar has no rule named {name[:80]}")
        if name not in self.regex_by_rule:
            self.open_rules.append(name)
            self.regex_by_rule[name] = f"(?:{self._rule_body_regex(name)})"
            self.open_rules.pop()
        return self.regex_by_rule[name]

    def _rule_body_regex(self, name: str) -> str:
        text, place = self.rules[name], 0
        written: list[str] = []
        closing: list[str] = []
        length = 0
        while place < len(text):
            match = LARK_TOKEN.match(text, place)
            if match is None:
                raise InvalidRequest(
                    f"the grammar's rule {name} has an expression that is not supported: {text[place:][:40]}"
                )
            place = match.end()
            written.append(self._token_regex(match, closing, name))
            length += len(written[-1])
            if length > MAX_REGEX_LENGTH:
                raise InvalidRequest("the grammar is too long when its rules are written out")
        if closing:
            raise InvalidRequest(f"the grammar's rule {name} has an unclosed bracket")
        return "".join(written)

    def _token_regex(self, match: re.Match[str], closing: list[str], name: str) -> str:
        kind, text = match.lastgroup, match[0]
        if kind in ("space", "alias"):
            return ""
        if kind == "name":
            return self.rule_regex(text)
        if kind == "string":
            flags, text = ("i", text[:-1]) if text.endswith("i") else ("", text)
            return f"(?{flags}:{escape_regex(_unescape_lark_string(text[1:-1]))})"
        if kind == "range":
            first, last = (escape_regex(_unescape_lark_string(part[1:-1])) for part in text.split(".."))
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
                raise InvalidRequest(f"the grammar's rule {name} has an unmatched closing bracket")
            return ")" if text == ")" else ")?"
        return text


def _unescape_lark_string(text: str) -> str:
    try:
        return text.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError:
        raise InvalidRequest(f"the grammar has a string with a broken escape: {text[:40]}") from None


def escape_regex(text: str) -> str:
    return re.sub(r"[\\.+*?()|\[\]{}^$#&\-~]", r"\\\g<0>", text)
