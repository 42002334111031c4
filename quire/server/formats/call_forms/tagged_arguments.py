from __future__ import annotations

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass

from quire.engine.text.grammar_compiler import lark_json_rule
from quire.server.formats.call_forms import element_values
from quire.server.formats.call_forms.argument_forms import ArgumentsForm, is_literal_next
from quire.server.formats.call_forms.lark_rules import MAX_DEPTH, LarkRules, LiteralRuleWriter, LiteralSpelling
from quire.server.formats.call_forms.plain_values import is_string_only, may_be_literal, value_to_json
from quire.server.formats.call_forms.schema_patterns import schema_pattern
from quire.server.formats.call_forms.slots import KEY_SLOT, TAG, split_into_atoms
from quire.server.formats.schema_node import ANY_TYPE, SchemaNode, TypeVariant
from quire.server.formats.tools import strict_json
from quire.server.formats.tools.lark_calls import (
    ordered_optional_items_expressions,
    quote_lark_string,
    tool_property_entries,
)
from quire.server.formats.tools.text_source import ParserSteps, TextSource, partial_match_length
from quire.server.formats.tools.tool_call_sink import ToolCallSink
from quire.server.formats.tools.tool_parser import Schema, Tool

CDATA_BEGIN, CDATA_END = "<![CDATA[", "]]>"
VALID_KEY = re.compile(r"[^\s<>\"'=/][^<>\"'\n]*")


@dataclass(frozen=True, slots=True)
class TaggedArguments(ArgumentsForm):
    before_key: str
    infixes: Mapping[str, str]
    end: str
    separator: str
    spelling: LiteralSpelling
    sort: bool = False
    uses_cdata: bool = False
    """True if strings with markup are written as CDATA sections."""
    has_html_entities: bool = False
    element_prefix: str = ""
    item_name: str = ""
    """Name of a list item's element, if lists and objects are written as elements."""

    @property
    def example(self) -> str:
        end = self.end.replace(KEY_SLOT, "<parameter-name>")
        return f"{self.before_key}<parameter-name>{self.infixes['string']}<value>{end}"

    @property
    def literals(self) -> tuple[str, ...]:
        return (self.before_key, *self.infixes.values(), self.end, self.separator, self.element_prefix)

    def is_argument_or_tail_next(self, source: TextSource, tail: str) -> ParserSteps[bool]:
        return (yield from is_literal_next(source, self.before_key)) or (yield from _is_call_end(source, tail))

    def stream_arguments(self, source: TextSource, sink: ToolCallSink, schema: Schema, tail: str) -> ParserSteps[bool]:
        whole = SchemaNode.from_document(schema)
        has_entries = False
        sink.add_arguments("{")
        while not (yield from _is_call_end(source, tail)):
            place = source.save_place()
            if has_entries and self.separator.strip():
                yield from source.take_ignoring_space(self.separator)
            key_and_kind = yield from _read_key_and_value_type(self, source)
            if key_and_kind is None:
                source.restore_place(place)
                return False
            key, kind = key_and_kind
            sink.add_arguments(f"{', ' if has_entries else ''}{strict_json.write_json(key)}: ")
            has_entries = True
            if not (yield from _stream_value(self, source, sink, key, whole.property_node(key), kind)):
                return False
            end = self.end.replace(KEY_SLOT, key).strip()
            while end and (yield from source.take_after_space(end)):
                pass  # some models repeat the end text
        sink.add_arguments("}")
        return True

    def lark_expressions(self, tool: Tool, rules: LarkRules) -> list[str]:
        entries = []
        known_properties = tool_property_entries(tool)
        for name, node, required in sorted(known_properties, key=lambda one: one[0]) if self.sort else known_properties:
            entries.append((_argument_expression(self, name, node, rules), required))
        separator = " ".join(rules.split_literal(self.separator))
        if separator:
            return ordered_optional_items_expressions(entries, separator)
        return [f"( {entry} ){'' if required else '?'}" for entry, required in entries]


def _is_call_end(source: TextSource, tail: str) -> ParserSteps[bool]:
    """Returns True if any tag of `tail` follows, because some models omit the other tags."""
    for mark in TAG.findall(tail) or [tail]:
        if (yield from is_literal_next(source, mark)):
            return True
    return False


def _read_key_and_value_type(form: TaggedArguments, source: TextSource) -> ParserSteps[tuple[str, str] | None]:
    """Returns the key, and the value's type or "" if the text does not determine it."""
    if form.before_key.strip() and not (yield from source.take_ignoring_space(form.before_key)):
        return None
    infixes: dict[str, list[str]] = {}
    for kind, infix in form.infixes.items():
        infixes.setdefault(infix, []).append(kind)
    first = next(one for one in split_into_atoms(next(iter(infixes)).strip()))
    key_and_end = yield from source.take_through_first_literal((first,))
    if key_and_end is None or not VALID_KEY.fullmatch(key_and_end[0].strip()):
        return None
    source.give_back(first)
    for infix in sorted(infixes, key=len, reverse=True):
        if (yield from source.take_ignoring_space(infix)):
            space = infix[len(infix.rstrip()) :]
            if space:
                yield from source.take_exactly(space)
            kinds = infixes[infix]
            typed = len(infixes) > 1 and ("string" not in kinds or len(kinds) == 1)
            return key_and_end[0].strip(), ("string" if "string" in kinds else "other") if typed else ""
    return None


def _stream_value(
    form: TaggedArguments, source: TextSource, sink: ToolCallSink, key: str, node: SchemaNode, kind: str
) -> ParserSteps[bool]:
    """`kind`: "string" or "other" if the text determines the type, else ""."""
    end = form.end.replace(KEY_SLOT, key)
    core = end.strip()
    space = end[: len(end) - len(end.lstrip())]
    variants = node.variants()
    if form.uses_cdata and (yield from source.take_exactly(CDATA_BEGIN)):
        sink.add_arguments('"')
        if not (yield from _stream_text(source, sink, (CDATA_END,), html_entities=False)):
            return False
        yield from source.take_ignoring_space(core)
        sink.add_arguments('"')
        return True
    if kind == "other":
        variants = [variant for variant in variants if variant.type != "string"] or [TypeVariant(ANY_TYPE, {})]
    ends = (space + core, core)
    if kind != "string" and not is_string_only(variants):
        while (undecided := _may_become_literal(form, source.text, ends, variants)) and core not in source.text:
            if source.is_closed:
                return False
            yield
        if undecided or core in source.text:
            written = yield from _read_until_end(source, core, f"{form.element_prefix}{key}>" if form.item_name else "")
            if written is None:
                return False
            sink.add_arguments(_tagged_value_to_json(form, written.removesuffix(space), node, variants))
            return True
    sink.add_arguments('"')
    if not (yield from _stream_text(source, sink, ends, html_entities=form.has_html_entities)):
        return False
    sink.add_arguments('"')
    return True


def _stream_text(
    source: TextSource, sink: ToolCallSink, ends: tuple[str, ...], *, html_entities: bool
) -> ParserSteps[bool]:
    """Consumes the first of `ends`. Returns False if the answer ends before it."""
    pieces: list[str] = []

    def stream_piece(piece: str) -> None:
        if html_entities:
            pieces.append(piece)
        else:
            sink.add_arguments(strict_json.write_json(piece)[1:-1])

    while True:
        end_places = [(place, -len(end)) for end in ends if (place := source.text.find(end)) >= 0]
        if end_places:
            place, length = min(end_places)
            stream_piece(source.take_text(place))
            source.take_text(-length)
            sink.add_arguments(strict_json.write_json(html.unescape("".join(pieces)))[1:-1])
            return True
        keep = partial_match_length(source.text, ends)
        stream_piece(source.take_text(len(source.text) - keep))
        if source.is_closed:
            sink.add_arguments(strict_json.write_json(html.unescape("".join(pieces)))[1:-1])
            source.take_text(keep)
            return False
        yield


def _read_until_end(source: TextSource, end: str, begin: str) -> ParserSteps[str | None]:
    """Skips an `end` that belongs to a `begin` inside the text."""
    start = 0
    while True:
        place = source.text.find(end, start)
        if place >= 0 and begin and source.text.count(begin, 0, place) > source.text.count(end, 0, place):
            start = place + len(end)
            continue
        if place >= 0:
            return source.take_text(place + len(end))[:place]
        if source.is_closed:
            return None
        yield


def _may_become_literal(form: TaggedArguments, begun: str, ends: tuple[str, ...], variants: list[TypeVariant]) -> bool:
    """Returns True if the value may have another type than string."""
    return bool(form.item_name) or may_be_literal(
        begun[: len(begun) - partial_match_length(begun, ends)], variants, form.spelling
    )


def _tagged_value_to_json(form: TaggedArguments, written: str, node: SchemaNode, variants: list[TypeVariant]) -> str:
    if form.has_html_entities:
        written = html.unescape(written)
    if form.item_name:
        return strict_json.write_json(element_values.parse_element(written, form.element_prefix, form.item_name, node))
    return value_to_json(written, variants, form.spelling)


def _argument_expression(form: TaggedArguments, name: str, node: SchemaNode, rules: LarkRules) -> str:
    end = form.end.replace(KEY_SLOT, name)
    alternatives = []
    for variant in node.variants():
        begin = rules.split_literal(
            form.before_key + name + form.infixes.get(variant.numeric_merged_type, form.infixes["string"])
        )
        alternatives.append(" ".join([*begin, *_variant_value_expressions(form, variant, node, end, rules)]))
    alternatives = list(dict.fromkeys(alternatives))
    return alternatives[0] if len(alternatives) == 1 else f"( {' | '.join(alternatives)} )"


def _variant_value_expressions(
    form: TaggedArguments, variant: TypeVariant, node: SchemaNode, end: str, rules: LarkRules
) -> list[str]:
    closing = rules.split_literal(end)
    if variant.type == "string":
        return _string_expressions(form, variant, end, rules)
    if form.has_html_entities and variant.type in ("array", "object", ANY_TYPE):
        return [rules.text_then_end(end)]
    if form.item_name and (variant.type in ("array", "object", ANY_TYPE)):
        return _element_expressions(form, variant, node, end, rules, 0)
    if variant.type in ("boolean", "null", "array", "object", ANY_TYPE):
        return [LiteralRuleWriter(rules, form.spelling).value_expression(node.with_schema(variant.schema)), *closing]
    return [lark_json_rule(node.with_schema(variant.schema).standalone_schema()), *closing]


def _string_expressions(form: TaggedArguments, variant: TypeVariant, end: str, rules: LarkRules) -> list[str]:
    closing = rules.split_literal(end)
    if variant.enum is not None:
        texts = [encode_tagged_string(form, str(one)) for one in variant.enum]
        return [
            f"( {' | '.join(' '.join(rules.split_literal(one)) or quote_lark_string('') for one in texts)} )",
            *closing,
        ]
    pattern = None if form.has_html_entities else schema_pattern(variant.schema)
    if form.uses_cdata and pattern is not None:
        return [quote_lark_string(CDATA_BEGIN), rules.text_then_end(CDATA_END, pattern), *closing]
    if form.uses_cdata:
        plain = " ".join([rules.add_terminal("/[^<]*/"), *closing])
        return [f"( {quote_lark_string(CDATA_BEGIN)} {rules.text_then_end(CDATA_END)} {' '.join(closing)} | {plain} )"]
    return [rules.text_then_end(end, pattern)]


def _element_expressions(
    form: TaggedArguments, variant: TypeVariant, node: SchemaNode, end: str, rules: LarkRules, depth: int
) -> list[str]:
    if variant.type == ANY_TYPE or depth > MAX_DEPTH:
        return [rules.text_then_end(end)]
    if variant.type not in ("array", "object"):
        return _variant_value_expressions(form, variant, node, end, rules)
    inside = node.with_schema(variant.schema)
    known = inside.property_entries() if variant.type == "object" else [(form.item_name, inside.item_node(0), False)]
    if variant.enum is not None or not known or (variant.type == "array" and inside.item_node(0).schema is True):
        return [rules.text_then_end(end)]
    expressions = []
    for name, inner, required in known:
        begin, close = rules.split_literal(f"{form.element_prefix}{name}>"), f"{form.element_prefix[:-1]}</{name}>"
        count = "*" if variant.type == "array" else "" if required else "?"
        variants = inner.variants()
        one = variants[0] if len(variants) == 1 else TypeVariant(ANY_TYPE, {})
        expressions.append(
            f"( {' '.join([*begin, *_element_expressions(form, one, inner, close, rules, depth + 1)])} ){count}"
        )
    return [*expressions, *rules.split_literal(end)]


def encode_tagged_string(form: TaggedArguments, value: str) -> str:
    if form.uses_cdata and any(one in value for one in "<&\n"):
        return f"{CDATA_BEGIN}{value}{CDATA_END}"
    return html.escape(value) if form.has_html_entities else value
