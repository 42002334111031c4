from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.engine.text.grammar_compiler import lark_json_rule
from quire.server.formats.call_forms.schema_patterns import pattern_then_end_terminal, schema_pattern
from quire.server.formats.call_forms.slots import TAG
from quire.server.formats.schema_node import SchemaNode, TypeVariant
from quire.server.formats.tools.lark_calls import ordered_optional_items_expressions, quote_lark_string

LiteralEncoder = Callable[[str], str]
LITERAL_PIECES = re.compile(r'"(?:[^"\\]|\\.)*"|<\[\d+\]>')
JSON_STRING_QUOTE = '\\"'
MAX_DEPTH = 12
NUMBER_REGEX = r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/"


@dataclass(frozen=True, slots=True)
class LiteralSpelling:
    true: str = "true"
    false: str = "false"
    null: str = "null"
    json_lists: bool = True
    json_objects: bool = True


@dataclass(slots=True)
class LarkRules:
    encode_literal: LiteralEncoder
    names_by_body: dict[str, str] = field(default_factory=dict)

    def split_literal(self, literal: str) -> list[str]:
        """Splits at special tokens, and makes each text's leading whitespace a separate word. llguidance takes the
        longest matching word and does not backtrack, so at one place no word may be another word's prefix.
        """
        expressions = []
        for piece in self.literal_parts(literal):
            words = re.match(r"(\s*)(.*)", "" if piece.startswith("<[") else json.loads(piece), re.DOTALL)
            assert words is not None
            expressions += [quote_lark_string(word) for word in words.groups() if word] or [piece]
        return expressions

    def literal_parts(self, literal: str) -> list[str]:
        return LITERAL_PIECES.findall(self.encode_literal(literal)) if literal else []

    def add_rule(self, head: str, body: str) -> str:
        """Equal rules share one name. `head` contains options such as `[suffix="…"]`."""
        return self.names_by_body.setdefault(f"{head}: {body}", f"r{len(self.names_by_body)}")

    def add_terminal(self, body: str) -> str:
        return self.names_by_body.setdefault(f": {body}", f"T{len(self.names_by_body)}")

    def text_then_end(self, end: str, pattern: str | None = None) -> str:
        """As in the parsers, the first tag of `end` ends the text, whatever whitespace precedes the tag."""
        if pattern is not None:
            return self._pattern_then_end_expression(end, pattern)
        pieces = self.literal_parts(end)
        anything = "/(?s:.*)/"
        if not pieces[0].startswith("<[") and len(pieces) > 1 and not json.loads(pieces[0]).strip():
            pieces = pieces[1:]  # whitespace before a special token belongs to the text
        if pieces[0].startswith("<["):
            return " ".join([self.add_terminal(anything), *pieces])
        literal = json.loads(pieces[0])
        tag = TAG.match(literal.lstrip())
        if tag is None:
            return " ".join([self.add_rule(f"[suffix={pieces[0]}]", anything), *pieces[1:]])
        rest = literal.lstrip()[tag.end() :]
        after = self.split_literal(rest) if rest else []
        return " ".join([self.add_rule(f"[suffix={quote_lark_string(tag[0])}]", anything), *after, *pieces[1:]])

    def _pattern_then_end_expression(self, end: str, pattern: str) -> str:
        """The expression requires the whitespace before the first tag of `end`, because parsers remove only this
        whitespace from the text.
        """
        core = end.lstrip() or end
        space = end[: len(end) - len(core)]
        first, *more = self.literal_parts(core)
        tag = TAG.match(core)
        if first.startswith("<["):
            text_rule = pattern_then_end_terminal(pattern, space, tag[0] if tag is not None else None)
            return " ".join([self.add_terminal(text_rule), first, *more])
        literal = json.loads(first)
        stop = tag[0] if tag is not None and literal.startswith(tag[0]) else literal
        rest = literal[len(stop) :]
        after = self.split_literal(rest) if rest else []
        return " ".join([self.add_terminal(pattern_then_end_terminal(pattern, space + stop, stop)), *after, *more])

    def render_rules(self) -> str:
        return "".join(f"{name}{body}\n" for body, name in self.names_by_body.items())


@dataclass(frozen=True, slots=True)
class LiteralRuleWriter:
    """Omits constraints that Lark cannot express."""

    rules: LarkRules
    spelling: LiteralSpelling
    quote: str = "'"
    is_raw: bool = False
    bare_keys: bool = False
    colon: str = ": "
    comma: str = ", "
    sort: bool = False

    def value_expression(self, node: SchemaNode, depth: int = 0) -> str:
        if depth > MAX_DEPTH:
            return self._any_value_expression(depth)
        expressions = dict.fromkeys(self._variant_expression(variant, node, depth) for variant in node.variants())
        return f"( {' | '.join(expressions)} )" if len(expressions) > 1 else next(iter(expressions))

    def _variant_expression(self, variant: TypeVariant, node: SchemaNode, depth: int) -> str:
        spelling, schema = self.spelling, variant.schema
        if variant.enum is not None:
            return f"( {' | '.join(map(self.constant_expression, variant.enum))} )"
        match variant.type:
            case "string":
                return self.string_expression(schema)
            case "integer" | "number":
                return lark_json_rule(node.with_schema(schema).standalone_schema())
            case "boolean":
                return f"( {quote_lark_string(spelling.true)} | {quote_lark_string(spelling.false)} )"
            case "null":
                return quote_lark_string(spelling.null)
            case "array" if self.spelling.json_lists and not depth:
                return lark_json_rule(node.with_schema(schema).standalone_schema())
            case "object" if self.spelling.json_objects and not depth:
                return lark_json_rule(node.with_schema(schema).standalone_schema())
            case "array":
                return self._array_expression(schema, node.with_schema(schema), depth)
            case "object":
                return self._object_expression(schema, node, depth)
        return self._any_value_expression(depth)

    def _array_expression(self, schema: Mapping[str, Any], node: SchemaNode, depth: int) -> str:
        item = self.value_expression(node.with_schema(schema.get("items", True)), depth + 1)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = f"{item} ( {quote_lark_string(self.comma)} {item} ){more}"
        return f'"[" {items} "]"' if least else f'"[" ( {items} )? "]"'

    def _object_expression(self, schema: Mapping[str, Any], node: SchemaNode, depth: int) -> str:
        if schema.get("properties"):
            return self._closed_object_expression(node.with_schema(schema), depth)
        if schema.get("additionalProperties") is False:
            return '"{" "}"'
        values = node.with_schema(schema.get("additionalProperties", True))
        return self._open_object_expression(self.value_expression(values, depth + 1))

    def _closed_object_expression(self, node: SchemaNode, depth: int) -> str:
        known = node.property_entries()
        entries = [
            (f"{self._key_expression(key)} {self.value_expression(value, depth + 1)}", required)
            for key, value, required in (sorted(known, key=lambda one: one[0]) if self.sort else known)
        ]
        return " ".join(['"{"', *ordered_optional_items_expressions(entries, quote_lark_string(self.comma)), '"}"'])

    def _key_expression(self, key: str) -> str:
        return " ".join(self.rules.split_literal((key if self.bare_keys else self.quote_string(key)) + self.colon))

    def _open_object_expression(self, value: str) -> str:
        key = "/[A-Za-z0-9_.-]+/" if self.bare_keys else self.string_expression()
        entry = f"{key} {quote_lark_string(self.colon)} {value}"
        return f'"{{" ( {entry} ( {quote_lark_string(self.comma)} {entry} )* )? "}}"'

    def _any_value_expression(self, depth: int) -> str:
        if not depth and self.spelling.json_lists and self.spelling.json_objects:
            constants = " | ".join(
                quote_lark_string(word) for word in (self.spelling.true, self.spelling.false, self.spelling.null)
            )
            return f"( {lark_json_rule(True)} | {constants} )"
        name, spelling = "anyvalue", self.spelling
        constants = " | ".join(quote_lark_string(word) for word in (spelling.true, spelling.false, spelling.null))
        array = f'"[" ( {name} ( {quote_lark_string(self.comma)} {name} )* )? "]"'
        return self.rules.names_by_body.setdefault(
            f": {self.string_expression()} | {NUMBER_REGEX} | {constants} | "
            f"{array} | {self._open_object_expression(name)}",
            name,
        )

    def string_expression(self, schema: Any = None) -> str:
        """Ignores the schema's pattern for strings inside a JSON string, and for raw strings in double quotes."""
        if self.quote == JSON_STRING_QUOTE:
            return r"""/\\"([^"\\\x00-\x1f]|\\\\(\\"|\\\\|[bfnrt\/]))*\\"/"""
        pattern = schema_pattern(schema)
        if self.is_raw and len(self.quote) > 1:
            quote = " ".join(self.rules.split_literal(self.quote))
            return f"{quote} {self.rules.text_then_end(self.quote, pattern)}"
        if pattern is not None and not (self.is_raw and self.quote == '"'):
            return lark_json_rule({"type": "string", "pattern": schema["pattern"]})
        if self.is_raw:
            return rf"/{self.quote}([^{self.quote}\\]|\\(?s:.))*{self.quote}/"
        return r"""/'([^'\\\n]|\\.)*'|"([^"\\\n]|\\.)*"/"""

    def constant_expression(self, value: Any) -> str:
        return " ".join(self.rules.split_literal(self.format_literal(value)))

    def format_literal(self, value: Any) -> str:
        spelling = self.spelling
        if isinstance(value, str):
            return self.quote_string(value)
        if value is None or isinstance(value, bool):
            return spelling.null if value is None else spelling.true if value else spelling.false
        if isinstance(value, list):
            return f"[{self.comma.join(map(self.format_literal, value))}]"
        if isinstance(value, dict):
            keys = sorted(value) if self.sort else value
            entries = [
                (key if self.bare_keys else self.quote_string(key)) + self.colon + self.format_literal(value[key])
                for key in keys
            ]
            return f"{{{self.comma.join(entries)}}}"
        return json.dumps(value)

    def quote_string(self, value: str) -> str:
        if self.is_raw:
            return f"{self.quote}{value}{self.quote}"
        if self.quote == JSON_STRING_QUOTE:
            return json.dumps(json.dumps(value, ensure_ascii=False), ensure_ascii=False)[1:-1]
        return repr(value) if self.quote == "'" else json.dumps(value, ensure_ascii=False)
