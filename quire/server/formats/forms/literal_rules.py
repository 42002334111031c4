"""Lark rules for values that are written as literals, but not as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.engine.text.grammar import json_rule
from quire.server.formats.forms.patterns import pattern_of, terminal
from quire.server.formats.forms.slots import TAG
from quire.server.formats.schemas import SchemaNode, Variant
from quire.server.formats.tools.lark import separated, text

Token = Callable[[str], str]
PIECES = re.compile(r'"(?:[^"\\]|\\.)*"|<\[\d+\]>')
IN_STRING = '\\"'
"""The quote of JSON that is written into a JSON string."""
MAX_DEPTH = 12
NUMBER = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/"


@dataclass(frozen=True, slots=True)
class Words:
    """How a template writes constants, and values that hold others."""

    true: str = "true"
    false: str = "false"
    null: str = "null"
    json_lists: bool = True
    json_objects: bool = True
    """Lists and objects are written as JSON, with what is in them."""


@dataclass(slots=True)
class Rules:
    """Collects the rules that a grammar's expressions refer to."""

    token: Token
    named: dict[str, str] = field(default_factory=dict)
    """Names of rules by their bodies."""

    def pieces(self, literal: str) -> list[str]:
        """The expressions of a literal: its special tokens, and the texts between them.

        White space that a text begins with is a piece of its own: llguidance reads the longest word that fits and does
        not go back, so that of two words at one place neither may be the beginning of the other.
        """
        found = []
        for piece in self.parts(literal):
            words = re.match(r"(\s*)(.*)", "" if piece.startswith("<[") else json.loads(piece), re.DOTALL)
            assert words is not None
            found += [text(word) for word in words.groups() if word] or [piece]
        return found

    def parts(self, literal: str) -> list[str]:
        """The same, with texts as they are."""
        return PIECES.findall(self.token(literal)) if literal else []

    def named_rule(self, head: str, body: str) -> str:
        """The name of the rule with this body; `head` says its options, such as [suffix="…"]."""
        return self.named.setdefault(f"{head}: {body}", f"r{len(self.named)}")

    def terminal(self, body: str) -> str:
        return self.named.setdefault(f": {body}", f"T{len(self.named)}")

    def free(self, end: str, pattern: str | None = None) -> str:
        """Any text up to `end`, and that; with `pattern`, only texts all of which it matches. Where the end begins with
        a special token, text stops by itself.

        Of a text, the first tag ends it, whatever white space is around: parsers read that tag as the end, too.
        """
        if pattern is not None:
            return self._matching(end, pattern)
        pieces = self.parts(end)
        anything = "/(?s:.*)/"
        if not pieces[0].startswith("<[") and len(pieces) > 1 and not json.loads(pieces[0]).strip():
            pieces = pieces[1:]  # white space in front of a special token is part of the text
        if pieces[0].startswith("<["):
            return " ".join([self.terminal(anything), *pieces])
        literal = json.loads(pieces[0])
        tag = TAG.match(literal.lstrip())
        if tag is None:
            return " ".join([self.named_rule(f"[suffix={pieces[0]}]", anything), *pieces[1:]])
        rest = literal.lstrip()[tag.end() :]
        after = self.pieces(rest) if rest else []
        return " ".join([self.named_rule(f"[suffix={text(tag[0])}]", anything), *after, *pieces[1:]])

    def _matching(self, end: str, pattern: str) -> str:
        """White space before the end's first tag is written as it is there: parsers leave out no more than that."""
        core = end.lstrip() or end
        space = end[: len(end) - len(core)]
        first, *more = self.parts(core)
        tag = TAG.match(core)
        if first.startswith("<["):
            text_rule = terminal(pattern, space, tag[0] if tag is not None else None)
            return " ".join([self.terminal(text_rule), first, *more])
        literal = json.loads(first)
        stop = tag[0] if tag is not None and literal.startswith(tag[0]) else literal
        rest = literal[len(stop) :]
        after = self.pieces(rest) if rest else []
        return " ".join([self.terminal(terminal(pattern, space + stop, stop)), *after, *more])

    def written(self) -> str:
        return "".join(f"{name}{body}\n" for body, name in self.named.items())


@dataclass(frozen=True, slots=True)
class LiteralRules:
    """Writes rules of values that fit a JSON schema. What Lark cannot say of a schema is left open."""

    rules: Rules
    words: Words
    quote: str = "'"
    raw: bool = False
    bare_keys: bool = False
    colon: str = ": "
    comma: str = ", "
    sort: bool = False

    def value(self, node: SchemaNode, depth: int = 0) -> str:
        """The expression of a value."""
        if depth > MAX_DEPTH:
            return self._any(depth)
        found = dict.fromkeys(self._variant(variant, node, depth) for variant in node.variants())
        return f"( {' | '.join(found)} )" if len(found) > 1 else next(iter(found))

    def _variant(self, variant: Variant, node: SchemaNode, depth: int) -> str:
        words, schema = self.words, variant.schema
        if variant.enum is not None:
            return f"( {' | '.join(map(self.constant, variant.enum))} )"
        match variant.type:
            case "string":
                return self.string(schema)
            case "integer" | "number":
                return json_rule(node.at(schema).standalone())
            case "boolean":
                return f"( {text(words.true)} | {text(words.false)} )"
            case "null":
                return text(words.null)
            case "array" if self.words.json_lists and not depth:
                return json_rule(node.at(schema).standalone())
            case "object" if self.words.json_objects and not depth:
                return json_rule(node.at(schema).standalone())
            case "array":
                return self._array(schema, node.at(schema), depth)
            case "object" if schema.get("properties"):
                return self._object(node.at(schema), depth)
            case "object" if schema.get("additionalProperties") is False:
                return '"{" "}"'
            case "object":
                values = node.at(schema.get("additionalProperties", True))
                return self._free_object(self.value(values, depth + 1))
        return self._any(depth)

    def _array(self, schema: Mapping[str, Any], node: SchemaNode, depth: int) -> str:
        item = self.value(node.at(schema.get("items", True)), depth + 1)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = f"{item} ( {text(self.comma)} {item} ){more}"
        return f'"[" {items} "]"' if least else f'"[" ( {items} )? "]"'

    def _object(self, node: SchemaNode, depth: int) -> str:
        known = node.properties()
        entries = [
            (f"{self._key(key)} {self.value(value, depth + 1)}", required)
            for key, value, required in (sorted(known, key=lambda one: one[0]) if self.sort else known)
        ]
        return " ".join(['"{"', *separated(entries, text(self.comma)), '"}"'])

    def _key(self, key: str) -> str:
        return " ".join(self.rules.pieces((key if self.bare_keys else self.quoted(key)) + self.colon))

    def _free_object(self, value: str) -> str:
        key = "/[A-Za-z0-9_.-]+/" if self.bare_keys else self.string()
        entry = f"{key} {text(self.colon)} {value}"
        return f'"{{" ( {entry} ( {text(self.comma)} {entry} )* )? "}}"'

    def _any(self, depth: int) -> str:
        """Any value, by a rule that refers to itself."""
        if not depth and self.words.json_lists and self.words.json_objects:
            constants = " | ".join(text(word) for word in (self.words.true, self.words.false, self.words.null))
            return f"( {json_rule(True)} | {constants} )"
        name, words = "anyvalue", self.words
        constants = " | ".join(text(word) for word in (words.true, words.false, words.null))
        array = f'"[" ( {name} ( {text(self.comma)} {name} )* )? "]"'
        return self.rules.named.setdefault(
            f": {self.string()} | {NUMBER} | {constants} | {array} | {self._free_object(name)}", name
        )

    def string(self, schema: Any = None) -> str:
        """A string in quotes. Where escapes stand for characters, one with a pattern is JSON's, which parsers read
        too; in a string inside a string, and where quotes are JSON's and escapes are not, a pattern is left open."""
        if self.quote == IN_STRING:
            return r"""/\\"([^"\\\x00-\x1f]|\\\\(\\"|\\\\|[bfnrt\/]))*\\"/"""
        pattern = pattern_of(schema)
        if self.raw and len(self.quote) > 1:
            quote = " ".join(self.rules.pieces(self.quote))
            return f"{quote} {self.rules.free(self.quote, pattern)}"
        if pattern is not None and not (self.raw and self.quote == '"'):
            return json_rule({"type": "string", "pattern": schema["pattern"]})
        if self.raw:
            return rf"/{self.quote}([^{self.quote}\\]|\\(?s:.))*{self.quote}/"
        return r"""/'([^'\\\n]|\\.)*'|"([^"\\\n]|\\.)*"/"""

    def constant(self, value: Any) -> str:
        return " ".join(self.rules.pieces(self.written(value)))

    def written(self, value: Any) -> str:
        """A value as the template writes it."""
        words = self.words
        if isinstance(value, str):
            return self.quoted(value)
        if value is None or isinstance(value, bool):
            return words.null if value is None else words.true if value else words.false
        if isinstance(value, list):
            return f"[{self.comma.join(map(self.written, value))}]"
        if isinstance(value, dict):
            keys = sorted(value) if self.sort else value
            entries = [
                (key if self.bare_keys else self.quoted(key)) + self.colon + self.written(value[key]) for key in keys
            ]
            return f"{{{self.comma.join(entries)}}}"
        return json.dumps(value)

    def quoted(self, value: str) -> str:
        if self.raw:
            return f"{self.quote}{value}{self.quote}"
        if self.quote == IN_STRING:
            return json.dumps(json.dumps(value, ensure_ascii=False), ensure_ascii=False)[1:-1]
        return repr(value) if self.quote == "'" else json.dumps(value, ensure_ascii=False)
