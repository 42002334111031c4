from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.engine.text.grammar_compiler import lark_json_rule
from quire.server.formats.call_forms.lark_rules import JSON_STRING_QUOTE, LarkRules, LiteralRuleWriter, LiteralSpelling
from quire.server.formats.call_forms.literal_syntax import LiteralSyntax, UnreadableLiteral
from quire.server.formats.schema_node import SchemaNode
from quire.server.formats.tools import strict_json
from quire.server.formats.tools.json_calls import read_json_arguments
from quire.server.formats.tools.json_repair import repair_json
from quire.server.formats.tools.lark_calls import ordered_optional_items_expressions, tool_property_entries
from quire.server.formats.tools.text_source import ParserSteps, TextSource, partial_match_length
from quire.server.formats.tools.tool_call_sink import ToolCallSink
from quire.server.formats.tools.tool_parser import Schema, Tool


class ArgumentsForm(ABC):
    sort: bool
    before_key: str

    @property
    def example(self) -> str:
        return "<args-json-object>"

    @property
    def literals(self) -> tuple[str, ...]:
        return ()

    def try_skip_space_before_arguments(self, source: TextSource) -> ParserSteps[bool]:
        return True
        yield

    def is_argument_or_tail_next(self, source: TextSource, tail: str) -> ParserSteps[bool]:
        return (yield from is_literal_next(source, self.before_key)) or (yield from is_literal_next(source, tail))

    @abstractmethod
    def stream_arguments(self, source: TextSource, sink: ToolCallSink, schema: Schema, tail: str) -> ParserSteps[bool]:
        """Returns False if the arguments are broken or incomplete."""

    @abstractmethod
    def lark_expressions(self, tool: Tool, rules: LarkRules) -> list[str]:
        """The expressions match arguments that fit the tool's schema, as the template writes them."""


@dataclass(frozen=True, slots=True)
class JsonArguments(ArgumentsForm):
    before_key: str = "{"
    sort: bool = False
    indented: bool = False
    is_json_string: bool = False

    def try_skip_space_before_arguments(self, source: TextSource) -> ParserSteps[bool]:
        if (yield from source.peek_non_space_character()) not in ("{", '"'):
            return False
        source.take_text(len(source.text) - len(source.text.lstrip()))
        return True

    def stream_arguments(self, source: TextSource, sink: ToolCallSink, schema: Schema, tail: str) -> ParserSteps[bool]:
        if (yield from source.peek_non_space_character()) == '"':
            try:
                written = yield from LiteralSyntax('"').parse_next_literal(source)
            except UnreadableLiteral:
                return False
            sink.add_arguments(
                repair_json(written) or written if isinstance(written, str) else strict_json.write_json(written)
            )
            return True
        return (yield from read_json_arguments(source, sink))

    def lark_expressions(self, tool: Tool, rules: LarkRules) -> list[str]:
        if self.is_json_string:
            string_rules = LiteralRuleWriter(
                rules, LiteralSpelling(json_lists=False, json_objects=False), JSON_STRING_QUOTE, sort=self.sort
            )
            return [
                '"\\""',
                string_rules.value_expression(SchemaNode.from_document({"properties": {}, **tool.parameters}), 1),
                '"\\""',
            ]
        schema = schema_with_sorted_properties(tool.parameters) if self.sort else tool.parameters
        return [lark_json_rule(schema, indented=self.indented)]


@dataclass(frozen=True, slots=True)
class LiteralArguments(ArgumentsForm):
    """Literals without their outer brackets: f(a='x', b=1), {'a': 'x'}, {a:<|"|>x<|"|>}."""

    before_key: str
    colon: str
    separator: str
    syntax: LiteralSyntax
    spelling: LiteralSpelling
    after_value: str = ""
    sort: bool = False

    @property
    def example(self) -> str:
        return f"{self.before_key}<parameter-name>{self.colon}<value>{self.after_value}{self.separator}..."

    @property
    def literals(self) -> tuple[str, ...]:
        return (self.before_key, self.colon, self.separator, self.syntax.quote, self.after_value)

    def stream_arguments(self, source: TextSource, sink: ToolCallSink, schema: Schema, tail: str) -> ParserSteps[bool]:
        has_entries = False
        sink.add_arguments("{")
        try:
            while not (yield from is_literal_next(source, tail)):
                if has_entries and not (yield from source.take_ignoring_space(self.separator)):
                    return False
                if has_entries and (yield from is_literal_next(source, tail)):
                    break
                yield from self._stream_entry(source, sink, has_entries)
                has_entries = True
        except UnreadableLiteral:
            return False
        sink.add_arguments("}")
        return True

    def _stream_entry(self, source: TextSource, sink: ToolCallSink, begun: bool) -> ParserSteps[None]:
        bare = self.before_key.strip("\"' \n\t")
        if bare and not (yield from source.take_ignoring_space(bare)):
            raise UnreadableLiteral
        core = self.colon.strip("\"' \n\t")
        key = yield from self.syntax.parse_next_key(source, (core,))
        if not (yield from source.take_ignoring_space(core)):
            raise UnreadableLiteral
        sink.add_arguments(f"{', ' if begun else ''}{strict_json.write_json(key)}: ")
        quote = self.syntax.quote
        if len(quote) > 1 and self.syntax.raw and (yield from source.take_after_space(quote)):
            yield from _stream_string_text(source, sink, quote)
        else:
            sink.add_arguments(strict_json.write_json((yield from self.syntax.parse_next_literal(source))))
        if self.after_value.strip() and not (yield from source.take_ignoring_space(self.after_value)):
            raise UnreadableLiteral

    def lark_expressions(self, tool: Tool, rules: LarkRules) -> list[str]:
        writer = self.rule_writer(rules)
        entries = []
        known_properties = tool_property_entries(tool)
        for name, node, required in (
            sorted(known_properties, key=_property_entry_name) if self.sort else known_properties
        ):
            begin, end = rules.split_literal(self.before_key + name + self.colon), rules.split_literal(self.after_value)
            entries.append((" ".join([*begin, writer.value_expression(node), *end]), required))
        return ordered_optional_items_expressions(entries, " ".join(rules.split_literal(self.separator)))

    def rule_writer(self, rules: LarkRules) -> LiteralRuleWriter:
        uses_own_quotes = len(self.syntax.quote) > 1
        colon, comma = (self.colon, self.separator) if uses_own_quotes else (": ", ", ")
        return LiteralRuleWriter(
            rules, self.spelling, self.syntax.quote, self.syntax.raw, uses_own_quotes, colon, comma, sort=self.sort
        )


def schema_with_sorted_properties(schema: Any) -> Any:
    if isinstance(schema, Mapping):
        ordered = {name: schema_with_sorted_properties(value) for name, value in schema.items()}
        if isinstance(ordered.get("properties"), dict):
            ordered["properties"] = dict(sorted(ordered["properties"].items()))
        return ordered
    return [schema_with_sorted_properties(one) for one in schema] if isinstance(schema, list) else schema


def _property_entry_name(property_entry: tuple[str, SchemaNode, bool]) -> str:
    return property_entry[0]


def is_literal_next(source: TextSource, literal: str) -> ParserSteps[bool]:
    """Does not consume the literal."""
    if not literal.strip():
        return not (yield from source.peek_non_space_character())
    place = source.save_place()
    was_taken = yield from source.take_ignoring_space(literal)
    if was_taken:
        source.restore_place(place)
    return was_taken


def _stream_string_text(source: TextSource, sink: ToolCallSink, end: str) -> ParserSteps[None]:
    """Raises UnreadableLiteral if the answer ends before `end`."""
    sink.add_arguments('"')
    while (place := source.text.find(end)) < 0:
        if source.is_closed:
            raise UnreadableLiteral
        sink.add_arguments(
            escape_json_text(source.take_text(len(source.text) - partial_match_length(source.text, (end,))))
        )
        yield
    sink.add_arguments(escape_json_text(source.take_text(place)) + '"')
    source.take_text(len(end))


def escape_json_text(text: str) -> str:
    return strict_json.write_json(text)[1:-1]
