"""Lark grammars for llguidance: https://github.com/guidance-ai/llguidance, docs/syntax.md."""

from __future__ import annotations

import json
from collections.abc import Sequence

from quire.engine.text.grammar_compiler import lark_json_rule
from quire.server.formats.schema_node import SchemaNode
from quire.server.formats.tools.tool_parser import Tool


def lark_calls_grammar(
    calls: Sequence[Sequence[str]],
    many: bool,
    *,
    unlike: str,
    before: Sequence[str] = (),
    between: Sequence[str] = (),
    after: Sequence[str] = (),
    must: bool = True,
) -> str:
    """Unless `must`, the grammar also allows text that does not begin with a match of `unlike`."""
    more = ["(", *between, "call", ")*"] if many else []
    whole = " ".join([*before, "call", *more, *after])
    rules = [f"start: {whole}"] if must else [f"start: TEXT | {whole}", f"TEXT: /(?s:.*)/ & ~/({unlike})(?s:.*)/"]
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(calls))))
    rules += [f"call_{index}: {' '.join(call)}" for index, call in enumerate(calls)]
    return "\n".join(rules) + "\n"


def quote_lark_string(literal: str) -> str:
    return json.dumps(literal, ensure_ascii=False)


def json_call_expression_sequence(tool: Tool, *, in_words: bool) -> list[str]:
    """If `in_words`, splits the call as %json does. llguidance takes the longest word and does not backtrack, so a
    longer word would hide another object with the same start.
    """
    words = ["{", '"name"', ": ", json.dumps(tool.name), ", ", '"parameters"', ": "]
    return [
        *map(quote_lark_string, words if in_words else ["".join(words)]),
        lark_json_rule(tool.parameters),
        quote_lark_string("}"),
    ]


def keyword_call_expression_sequence(tool: Tool) -> list[str]:
    """Arguments come in the schema's order."""
    arguments = [
        (f"{quote_lark_string(name + '=')} {lark_json_rule(node.standalone_schema())}", required)
        for name, node, required in tool_property_entries(tool)
    ]
    return [
        quote_lark_string(f"{tool.name}("),
        *ordered_optional_items_expressions(arguments, quote_lark_string(", ")),
        quote_lark_string(")"),
    ]


def ordered_optional_items_expressions(items: Sequence[tuple[str, bool]], separator: str) -> list[str]:
    alternatives = []
    for index, (item, required) in enumerate(items):
        rest = [f"({separator} {later})" + ("" if needed else "?") for later, needed in items[index + 1 :]]
        alternatives.append(" ".join([item, *rest]))
        if required:
            break
    if not alternatives:
        return []
    skippable = "" if any(required for _, required in items) else "?"
    return [f"( {' | '.join(alternatives)} ){skippable}"]


def tool_property_entries(tool: Tool) -> list[tuple[str, SchemaNode, bool]]:
    return SchemaNode.from_document(tool.parameters).property_entries()
