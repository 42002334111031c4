"""Lark grammars of tool calls, as llguidance reads them: https://github.com/guidance-ai/llguidance, docs/syntax.md.

An expression is a string of Lark; a call is a list of them, one behind the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.engine.text.grammar import json_rule
from quire.server.formats.tools.format import Schema, Tool

XML_VALUE_END = "\n</parameter>\n"
RULES = f"xml_value[suffix={json.dumps(XML_VALUE_END)}]: /(?s:.*)/\n"


def grammar_of(
    calls: Sequence[Sequence[str]],
    many: bool,
    *,
    before: Sequence[str] = (),
    between: Sequence[str] = (),
    after: Sequence[str] = (),
    must: bool = True,
    unlike: str | None = None,
) -> str:
    """One of the calls, or many of them with `between` between.

    Unless they must be made there may be text before them, or nothing but text. Calls begin there with the first of
    `before`; or, with `unlike`, they are all of the answer, and text is what does not begin with this expression.
    """
    more = ["(", *between, "call", ")*"] if many else []
    whole = [*before, "call", *more, *after]
    rules = [f"start: {' '.join(whole)}"] if must else _optional(whole, unlike)
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(calls))))
    rules += [f"call_{index}: {' '.join(call)}" for index, call in enumerate(calls)]
    body = "\n".join(rules) + "\n"
    return body + RULES if "xml_value" in body else body


def _optional(calls: Sequence[str], unlike: str | None) -> list[str]:
    """The start rule and what it needs, for an answer that may have these calls."""
    trigger, rest = calls[0], " ".join(calls[1:])
    anything = "/(?s:.*)/"
    if unlike is not None:
        return [f"start: TEXT | {' '.join(calls)}", f"TEXT: {anything} & ~/({unlike})(?s:.*)/"]
    if trigger.startswith("<["):  # a special token, which text does not have
        return [f"start: TEXT ( {trigger} {rest} )?", f"TEXT: {anything}"]
    return [f"start: TEXT | lead {rest}", f"lead[suffix={trigger}]: {anything}", f"TEXT: {anything}"]


def text(literal: str) -> str:
    return json.dumps(literal, ensure_ascii=False)


def json_call(tool: Tool, arguments: str = "arguments", *, in_words: bool = False) -> list[str]:
    """{"name": …, "arguments": …}; `in_words`: in those that %json has for it. llguidance reads the longest word it can
    and does not go back, so a longer one would keep another grammar's object that begins alike from being read."""
    words = ["{", '"name"', ": ", json.dumps(tool.name), ", ", f'"{arguments}"', ": "]
    return [*map(text, words if in_words else ["".join(words)]), arguments_of(tool), text("}")]


def arguments_of(tool: Tool) -> str:
    """The arguments as one JSON object."""
    return json_rule(tool.parameters)


def keyword_call(tool: Tool) -> list[str]:
    """f(a=1, b=2): arguments in the schema's order, those not required may be left out."""
    arguments = [(f"{text(name + '=')} {json_rule(schema)}", required) for name, schema, required in properties(tool)]
    return [text(f"{tool.name}("), *_comma_separated(arguments), text(")")]


def _comma_separated(items: Sequence[tuple[str, bool]]) -> list[str]:
    """Alternatives by which item comes first; an optional one may be skipped."""
    alternatives = []
    for index, (item, required) in enumerate(items):
        rest = [f'(", " {later})' + ("" if needed else "?") for later, needed in items[index + 1 :]]
        alternatives.append(" ".join([item, *rest]))
        if required:
            break
    if not alternatives:
        return []
    skippable = "" if any(required for _, required in items) else "?"
    return [f"( {' | '.join(alternatives)} ){skippable}"]


def xml_parameters(tool: Tool, is_string: Callable[[Any], bool]) -> list[str]:
    """<parameter=key>, the value on lines of its own, </parameter>; in the schema's order."""
    parameters = []
    for name, schema, required in properties(tool):
        begin = text(f"<parameter={name}>\n")
        if not is_string(schema):
            body = f"{json_rule(schema)} {text(XML_VALUE_END)}"
        elif "enum" in schema:
            body = f"( {' | '.join(text(str(value)) for value in schema['enum'])} ) {text(XML_VALUE_END)}"
        else:
            body = "xml_value"
        parameters.append(f"( {begin} {body} ){'' if required else '?'}")
    return parameters


def properties(tool: Tool) -> list[tuple[str, Any, bool]]:
    """Name, schema with the definitions it may refer to, and whether it is required."""
    schema: Schema = tool.parameters
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    found = []
    for name, value in (schema.get("properties") or {}).items():
        whole = {**value, **shared} if isinstance(value, Mapping) else value
        found.append((name, whole, name in (schema.get("required") or [])))
    return found
