"""Arguments between tags: what reads them, and the grammar that allows nothing else."""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.engine.text.grammar import json_rule
from quire.server.formats.forms import elements
from quire.server.formats.forms.arguments import Arguments, comes
from quire.server.formats.forms.literal_rules import MAX_DEPTH, LiteralRules, Rules, Words, definitions
from quire.server.formats.forms.patterns import pattern_of
from quire.server.formats.forms.slots import KEY, TAG, atoms
from quire.server.formats.tools import strict_json
from quire.server.formats.tools.format import Schema, Tool
from quire.server.formats.tools.lark import properties, separated, text
from quire.server.formats.tools.sink import Sink
from quire.server.formats.tools.source import Source, Steps, held_back

CDATA, CDATA_END = "<![CDATA[", "]]>"
KEY_TEXT = re.compile(r"[^\s<>\"'=/][^<>\"'\n]*")
SIMPLE = {"integer": "number", "number": "number", "string": "string", "boolean": "boolean", "null": "null"}


@dataclass(frozen=True, slots=True)
class TaggedArguments(Arguments):
    """Keys between tags, and values between tags: strings as they are, others as JSON or Python writes them."""

    before_key: str
    infixes: Mapping[str, str]
    """What stands between key and value, by the JSON type of the value."""
    end: str
    """What follows a value. It may hold the character for the KEY."""
    separator: str
    words: Words
    sort: bool = False
    cdata: bool = False
    """Strings with markup stand in a CDATA section."""
    html: bool = False
    """Strings have HTML's entities."""
    element: str = ""
    item: str = ""
    """If lists and objects are written as elements: what stands before an element's name, and the name of a list's."""

    @property
    def example(self) -> str:
        end = self.end.replace(KEY, "<parameter-name>")
        return f"{self.before_key}<parameter-name>{self.infixes['string']}<value>{end}"

    @property
    def literals(self) -> tuple[str, ...]:
        return (self.before_key, *self.infixes.values(), self.end, self.separator, self.element)

    def read(self, source: Source, sink: Sink, schema: Schema, tail: str) -> Steps[bool]:
        known = schema.get("properties")
        begun = False
        sink.arguments("{")
        while not (yield from _ends(source, tail)):
            place = source.here()
            if begun and self.separator.strip():
                yield from source.loosely(self.separator)
            found = yield from _read_key(self, source)
            if found is None:
                source.back(place)
                return False
            key, kind = found
            declared = known.get(key, {}) if isinstance(known, dict) else {}
            sink.arguments(f"{', ' if begun else ''}{strict_json.write(key)}: ")
            begun = True
            string = kind == "string" if kind else is_string(declared)
            if not (yield from _read_value(self, source, sink, key, declared, string=string)):
                return False
        sink.arguments("}")
        return True

    def rule(self, tool: Tool, rules: Rules) -> list[str]:
        entries = []
        found = properties(tool)
        for name, schema, required in sorted(found, key=lambda one: one[0]) if self.sort else found:
            entries.append((_entry(self, name, schema, rules), required))
        separator = " ".join(rules.pieces(self.separator))
        if separator:
            return separated(entries, separator)
        return [f"( {entry} ){'' if required else '?'}" for entry, required in entries]


def _ends(source: Source, tail: str) -> Steps[bool]:
    """Whether the end of the call comes next: one of its tags, for models forget some, or all of it if it has none."""
    for mark in TAG.findall(tail) or [tail]:
        if (yield from comes(source, mark)):
            return True
    return False


def _read_key(form: TaggedArguments, source: Source) -> Steps[tuple[str, str] | None]:
    """The next key, and the type of its value where the text tells it. None, when no key comes."""
    if form.before_key.strip() and not (yield from source.loosely(form.before_key)):
        return None
    infixes: dict[str, list[str]] = {}
    for kind, infix in form.infixes.items():
        infixes.setdefault(infix, []).append(kind)
    first = next(one for one in atoms(next(iter(infixes)).strip()))
    found = yield from source.until((first,))
    if found is None or not KEY_TEXT.fullmatch(found[0].strip()):
        return None
    source.give_back(first)
    for infix in sorted(infixes, key=len, reverse=True):
        if (yield from source.loosely(infix)):
            space = infix[len(infix.rstrip()) :]
            if space:
                yield from source.exactly(space)
            kinds = infixes[infix]
            typed = len(infixes) > 1 and ("string" not in kinds or len(kinds) == 1)
            return found[0].strip(), ("string" if "string" in kinds else "other") if typed else ""
    return None


def _read_value(
    form: TaggedArguments, source: Source, sink: Sink, key: str, declared: Any, *, string: bool
) -> Steps[bool]:
    """Pass on a value, and take what follows it. False when it does not end."""
    end = form.end.replace(KEY, key)
    core = end.strip()
    space = end[: len(end) - len(end.lstrip())]
    if form.cdata and (yield from source.exactly(CDATA)):
        sink.arguments('"')
        if not (yield from _pass_text(source, sink, (CDATA_END,), html_entities=False)):
            return False
        yield from source.loosely(core)
        sink.arguments('"')
    elif string:
        sink.arguments('"')
        if not (yield from _pass_text(source, sink, (space + core, core), html_entities=form.html)):
            return False
        sink.arguments('"')
    else:
        written = yield from _whole(source, core, f"{form.element}{key}>" if form.item else "")
        if written is None:
            return False
        sink.arguments(as_json(written.strip(), declared, form))
    return True


def _pass_text(source: Source, sink: Sink, ends: tuple[str, ...], *, html_entities: bool) -> Steps[bool]:
    """Pass on text up to the first of `ends`, which is taken too."""
    pieces: list[str] = []

    def passed(piece: str) -> None:
        if html_entities:
            pieces.append(piece)
        else:
            sink.arguments(strict_json.write(piece)[1:-1])

    while True:
        found = [(place, -len(end)) for end in ends if (place := source.text.find(end)) >= 0]
        if found:
            place, length = min(found)
            passed(source.take(place))
            source.take(-length)
            sink.arguments(strict_json.write(html.unescape("".join(pieces)))[1:-1])
            return True
        keep = held_back(source.text, ends)
        passed(source.take(len(source.text) - keep))
        if source.closed:
            sink.arguments(strict_json.write(html.unescape("".join(pieces)))[1:-1])
            source.take(keep)
            return False
        yield


def _whole(source: Source, end: str, begin: str) -> Steps[str | None]:
    """The text up to `end`, which is taken too; with `begin`, as many ends are passed over as there are begins."""
    start = 0
    while True:
        place = source.text.find(end, start)
        if place >= 0 and begin and source.text.count(begin, 0, place) > source.text.count(end, 0, place):
            start = place + len(end)
            continue
        if place >= 0:
            return source.take(place + len(end))[:place]
        if source.closed:
            return None
        yield


def is_string(schema: Any) -> bool:
    """Whether values of this schema are written as plain text."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    enum = schema.get("enum") if isinstance(schema, Mapping) else None
    return kind == "string" or (kind is None and isinstance(enum, list) and all(isinstance(one, str) for one in enum))


def as_json(written: str, declared: Any, form: TaggedArguments) -> str:
    """A value as JSON: the text itself if it is JSON, Python's literals as those of JSON, other text as a string."""
    if form.html:
        written = html.unescape(written)
    if form.item:
        return strict_json.write(elements.value(written, form.element, form.item, declared))
    constants = {form.words.true: "true", form.words.false: "false", form.words.null: "null"}
    constants = {"True": "true", "False": "false", "None": "null", **constants}
    found = constants.get(written) or _literal(written)
    if found is None or not _allowed(found, declared):
        return strict_json.write(written)
    return found


def _literal(written: str) -> str | None:
    try:
        strict_json.parse(written)
        return written
    except ValueError:
        pass
    if written[:1] in "[{(":
        try:
            return strict_json.write(ast.literal_eval(written))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            pass
    return None


def _allowed(found: str, declared: Any) -> bool:
    """Whether a value may be of its type by its schema, where that also allows strings."""
    kinds = declared.get("type") if isinstance(declared, Mapping) else None
    if not isinstance(kinds, list) or "string" not in kinds:
        return True
    value = strict_json.parse(found)
    names = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", str: "string"}
    name = "null" if value is None else names[type(value)]
    return name in kinds or (name == "integer" and "number" in kinds)


def _entry(form: TaggedArguments, name: str, schema: Any, rules: Rules) -> str:
    """One argument: its key, and its value of any type that the schema allows."""
    end = form.end.replace(KEY, name)
    alternatives = []
    for kind, one in by_kind(schema):
        begin = rules.pieces(form.before_key + name + form.infixes.get(kind, form.infixes["string"]))
        alternatives.append(" ".join([*begin, *_value(form, kind, one, end, rules)]))
    return alternatives[0] if len(alternatives) == 1 else f"( {' | '.join(alternatives)} )"


def _value(form: TaggedArguments, kind: str, schema: Any, end: str, rules: Rules) -> list[str]:
    closing = rules.pieces(end)
    if kind == "string":
        enum = schema.get("enum") if isinstance(schema, Mapping) else None
        if enum is None and isinstance(schema, Mapping) and "const" in schema:
            enum = [schema["const"]]
        pattern = None if form.html else pattern_of(schema)
        if not isinstance(enum, list) and form.cdata and pattern is not None:
            return [text(CDATA), rules.free(CDATA_END, pattern), *closing]
        if not isinstance(enum, list) and form.cdata:
            plain = " ".join([rules.terminal("/[^<]*/"), *closing])
            return [f"( {text(CDATA)} {rules.free(CDATA_END)} {' '.join(closing)} | {plain} )"]
        if not isinstance(enum, list):
            return [rules.free(end, pattern)]
        texts = [form_text(form, str(one)) for one in enum]
        return [f"( {' | '.join(' '.join(rules.pieces(one)) or text('') for one in texts)} )", *closing]
    if form.html and kind in ("array", "object", "any"):
        return [rules.free(end)]
    if form.item and (kind in ("array", "object") or (kind == "any" and not _constants(schema))):
        return _elements(form, schema, end, rules, 0)
    if kind in ("boolean", "null", "any", "array", "object"):
        return [LiteralRules(rules, form.words).value(schema), *closing]
    return [json_rule(schema), *closing]


def _elements(form: TaggedArguments, schema: Any, end: str, rules: Rules, depth: int) -> list[str]:
    """A value that may be made of elements, and its end."""
    kind, one = by_kind(schema)[0]
    if kind == "any" or len(by_kind(schema)) > 1 or depth > MAX_DEPTH:
        return [rules.free(end)]
    if kind not in ("array", "object"):
        return _value(form, kind, one, end, rules)
    if not one.get("properties" if kind == "object" else "items"):
        return [rules.free(end)]
    known = one["properties"] if kind == "object" else {form.item: one["items"]}
    found = []
    for name, inner in known.items():
        begin, close = rules.pieces(f"{form.element}{name}>"), f"{form.element[:-1]}</{name}>"
        count = "*" if kind == "array" else "" if name in (one.get("required") or []) else "?"
        found.append(f"( {' '.join([*begin, *_elements(form, inner, close, rules, depth + 1)])} ){count}")
    return [*found, *rules.pieces(end)]


def _kind_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, str | int | float):
        return "string" if isinstance(value, str) else "number"
    return "array" if isinstance(value, list) else "object"


def _constants(schema: Any) -> bool:
    return isinstance(schema, Mapping) and ("enum" in schema or "const" in schema)


def form_text(form: TaggedArguments, value: str) -> str:
    """A string as the template writes it."""
    if form.cdata and any(one in value for one in "<&\n"):
        return f"{CDATA}{value}{CDATA_END}"
    return html.escape(value) if form.html else value


def by_kind(schema: Any) -> list[tuple[str, Any]]:
    """The types that values of a schema may have, each with the schema of values of that type."""
    if is_string(schema):
        return [("string", schema)]
    if not isinstance(schema, Mapping):
        return [("any", True)]
    if isinstance(schema.get("$ref"), str):
        known = definitions(schema)
        return by_kind(known[schema["$ref"]]) if schema["$ref"] in known else [("any", schema)]
    for name in ("anyOf", "oneOf"):
        if (
            isinstance(schema.get(name), list)
            and schema[name]
            and all(isinstance(one, Mapping) for one in schema[name])
        ):
            shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
            return [found for one in schema[name] for found in by_kind({**one, **shared})]
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return [found for kind in kinds for found in by_kind({**schema, "type": kind})]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        grouped: dict[str, list[Any]] = {}
        for value in values:
            grouped.setdefault(_kind_of(value), []).append(value)
        return [(kind, {"enum": group}) for kind, group in grouped.items()]
    kind = SIMPLE.get(str(kinds), str(kinds) if kinds in ("array", "object") else "any")
    return [(kind, schema)]
