"""Arguments between tags: what reads them, and the grammar that allows nothing else."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass

from quire.engine.text.grammar import json_rule
from quire.server.formats.forms import elements
from quire.server.formats.forms.arguments import Arguments, comes
from quire.server.formats.forms.literal_rules import MAX_DEPTH, LiteralRules, Rules, Words
from quire.server.formats.forms.patterns import pattern_of
from quire.server.formats.forms.plain_values import as_json, is_text, may_be_literal
from quire.server.formats.forms.slots import KEY, TAG, atoms
from quire.server.formats.schemas import ANY, SchemaNode, Variant
from quire.server.formats.tools import strict_json
from quire.server.formats.tools.format import Schema, Tool
from quire.server.formats.tools.lark import properties, separated, text
from quire.server.formats.tools.sink import Sink
from quire.server.formats.tools.source import Source, Steps, held_back

CDATA, CDATA_END = "<![CDATA[", "]]>"
KEY_TEXT = re.compile(r"[^\s<>\"'=/][^<>\"'\n]*")


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

    def come(self, source: Source, tail: str) -> Steps[bool]:
        return (yield from comes(source, self.before_key)) or (yield from _ends(source, tail))

    def read(self, source: Source, sink: Sink, schema: Schema, tail: str) -> Steps[bool]:
        whole = SchemaNode.whole(schema)
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
            sink.arguments(f"{', ' if begun else ''}{strict_json.write(key)}: ")
            begun = True
            if not (yield from _read_value(self, source, sink, key, whole.property(key), kind)):
                return False
            end = self.end.replace(KEY, key).strip()
            while end and (yield from source.follows(end)):
                pass  # some models write it twice
        sink.arguments("}")
        return True

    def rule(self, tool: Tool, rules: Rules) -> list[str]:
        entries = []
        found = properties(tool)
        for name, node, required in sorted(found, key=lambda one: one[0]) if self.sort else found:
            entries.append((_entry(self, name, node, rules), required))
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
    form: TaggedArguments, source: Source, sink: Sink, key: str, node: SchemaNode, kind: str
) -> Steps[bool]:
    """Pass on a value, and take what follows it. `kind`: "string" or "other" where the text tells it. False when it
    does not end."""
    end = form.end.replace(KEY, key)
    core = end.strip()
    space = end[: len(end) - len(end.lstrip())]
    variants = node.variants()
    if form.cdata and (yield from source.exactly(CDATA)):
        sink.arguments('"')
        if not (yield from _pass_text(source, sink, (CDATA_END,), html_entities=False)):
            return False
        yield from source.loosely(core)
        sink.arguments('"')
        return True
    if kind == "other":
        variants = [variant for variant in variants if variant.type != "string"] or [Variant(ANY, {})]
    ends = (space + core, core)
    if kind != "string" and not is_text(variants):
        while (undecided := _may_be_literal(form, source.text, ends, variants)) and core not in source.text:
            if source.closed:
                return False
            yield
        if undecided or core in source.text:
            written = yield from _whole(source, core, f"{form.element}{key}>" if form.item else "")
            if written is None:
                return False
            sink.arguments(_as_json(form, written.removesuffix(space), node, variants))
            return True
    sink.arguments('"')
    if not (yield from _pass_text(source, sink, ends, html_entities=form.html)):
        return False
    sink.arguments('"')
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


def _may_be_literal(form: TaggedArguments, begun: str, ends: tuple[str, ...], variants: list[Variant]) -> bool:
    """Whether a value that begins so, of which the last characters may begin its end, may be no string."""
    return bool(form.item) or may_be_literal(begun[: len(begun) - held_back(begun, ends)], variants, form.words)


def _as_json(form: TaggedArguments, written: str, node: SchemaNode, variants: list[Variant]) -> str:
    if form.html:
        written = html.unescape(written)
    if form.item:
        return strict_json.write(elements.value(written, form.element, form.item, node))
    return as_json(written, variants, form.words)


def _entry(form: TaggedArguments, name: str, node: SchemaNode, rules: Rules) -> str:
    """One argument: its key, and its value of any type that the schema allows."""
    end = form.end.replace(KEY, name)
    alternatives = []
    for variant in node.variants():
        begin = rules.pieces(form.before_key + name + form.infixes.get(variant.kind, form.infixes["string"]))
        alternatives.append(" ".join([*begin, *_value(form, variant, node, end, rules)]))
    alternatives = list(dict.fromkeys(alternatives))
    return alternatives[0] if len(alternatives) == 1 else f"( {' | '.join(alternatives)} )"


def _value(form: TaggedArguments, variant: Variant, node: SchemaNode, end: str, rules: Rules) -> list[str]:
    """The expressions of a value of one of the types that `node` allows."""
    closing = rules.pieces(end)
    if variant.type == "string":
        return _text(form, variant, end, rules)
    if form.html and variant.type in ("array", "object", ANY):
        return [rules.free(end)]
    if form.item and (variant.type in ("array", "object", ANY)):
        return _elements(form, variant, node, end, rules, 0)
    if variant.type in ("boolean", "null", "array", "object", ANY):
        return [LiteralRules(rules, form.words).value(node.at(variant.schema)), *closing]
    return [json_rule(node.at(variant.schema).standalone()), *closing]


def _text(form: TaggedArguments, variant: Variant, end: str, rules: Rules) -> list[str]:
    closing = rules.pieces(end)
    if variant.enum is not None:
        texts = [form_text(form, str(one)) for one in variant.enum]
        return [f"( {' | '.join(' '.join(rules.pieces(one)) or text('') for one in texts)} )", *closing]
    pattern = None if form.html else pattern_of(variant.schema)
    if form.cdata and pattern is not None:
        return [text(CDATA), rules.free(CDATA_END, pattern), *closing]
    if form.cdata:
        plain = " ".join([rules.terminal("/[^<]*/"), *closing])
        return [f"( {text(CDATA)} {rules.free(CDATA_END)} {' '.join(closing)} | {plain} )"]
    return [rules.free(end, pattern)]


def _elements(
    form: TaggedArguments, variant: Variant, node: SchemaNode, end: str, rules: Rules, depth: int
) -> list[str]:
    """A value that may be made of elements, and its end."""
    if variant.type == ANY or depth > MAX_DEPTH:
        return [rules.free(end)]
    if variant.type not in ("array", "object"):
        return _value(form, variant, node, end, rules)
    inside = node.at(variant.schema)
    known = inside.properties() if variant.type == "object" else [(form.item, inside.item(0), False)]
    if variant.enum is not None or not known or (variant.type == "array" and inside.item(0).schema is True):
        return [rules.free(end)]
    found = []
    for name, inner, required in known:
        begin, close = rules.pieces(f"{form.element}{name}>"), f"{form.element[:-1]}</{name}>"
        count = "*" if variant.type == "array" else "" if required else "?"
        variants = inner.variants()
        one = variants[0] if len(variants) == 1 else Variant(ANY, {})
        found.append(f"( {' '.join([*begin, *_elements(form, one, inner, close, rules, depth + 1)])} ){count}")
    return [*found, *rules.pieces(end)]


def form_text(form: TaggedArguments, value: str) -> str:
    """A string as the template writes it."""
    if form.cdata and any(one in value for one in "<&\n"):
        return f"{CDATA}{value}{CDATA_END}"
    return html.escape(value) if form.html else value
