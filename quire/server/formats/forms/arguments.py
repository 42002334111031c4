"""How the arguments of a call are written: what reads them, and the grammar that allows nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.engine.text.grammar import json_rule
from quire.server.formats.forms.literal_rules import IN_STRING, LiteralRules, Rules, Words
from quire.server.formats.forms.literals import Literals, Unreadable
from quire.server.formats.schemas import SchemaNode
from quire.server.formats.tools import strict_json
from quire.server.formats.tools.format import Schema, Tool
from quire.server.formats.tools.json_calls import read_arguments
from quire.server.formats.tools.lark import properties, separated
from quire.server.formats.tools.mended_json import mended
from quire.server.formats.tools.sink import Sink
from quire.server.formats.tools.source import Source, Steps, held_back


class Arguments(ABC):
    sort: bool
    """The template writes keys in the order of the alphabet."""
    before_key: str
    """What arguments begin with, if there are any."""

    @property
    def example(self) -> str:
        return "<args-json-object>"

    @property
    def literals(self) -> tuple[str, ...]:
        """All texts around keys and values."""
        return ()

    def begin(self, source: Source) -> Steps[bool]:
        """Whether arguments may begin here. Takes white space that is none of theirs."""
        return True
        yield

    def come(self, source: Source, tail: str) -> Steps[bool]:
        """Whether arguments come next, or the `tail` that follows them. Takes nothing."""
        return (yield from comes(source, self.before_key)) or (yield from comes(source, tail))

    @abstractmethod
    def read(self, source: Source, sink: Sink, schema: Schema, tail: str) -> Steps[bool]:
        """Pass on the arguments of the open call as JSON; `tail` follows them. False: they break off or are broken."""

    @abstractmethod
    def rule(self, tool: Tool, rules: Rules) -> list[str]:
        """The expressions of arguments that fit the tool's schema, as the template writes them."""


@dataclass(frozen=True, slots=True)
class JsonArguments(Arguments):
    """One JSON object."""

    before_key: str = "{"
    sort: bool = False
    indented: bool = False
    in_string: bool = False
    """The object is written into a JSON string."""

    def begin(self, source: Source) -> Steps[bool]:
        if (yield from source.word()) not in ("{", '"'):
            return False
        source.take(len(source.text) - len(source.text.lstrip()))
        return True

    def read(self, source: Source, sink: Sink, schema: Schema, tail: str) -> Steps[bool]:
        if (yield from source.word()) == '"':
            try:
                written = yield from Literals('"').read(source)
            except Unreadable:
                return False
            sink.arguments(mended(written) or written if isinstance(written, str) else strict_json.write(written))
            return True
        return (yield from read_arguments(source, sink))

    def rule(self, tool: Tool, rules: Rules) -> list[str]:
        if self.in_string:
            written = LiteralRules(rules, Words(json_lists=False, json_objects=False), IN_STRING, sort=self.sort)
            return ['"\\""', written.value(SchemaNode.whole({"properties": {}, **tool.parameters}), 1), '"\\""']
        schema = in_order(tool.parameters) if self.sort else tool.parameters
        return [json_rule(schema, indented=self.indented)]


@dataclass(frozen=True, slots=True)
class LiteralArguments(Arguments):
    """Keys and values as literals: f(a='x', b=1), {'a': 'x'}, {a:<|"|>x<|"|>}. Brackets around them are not part."""

    before_key: str
    colon: str
    separator: str
    syntax: Literals
    words: Words
    after_value: str = ""
    sort: bool = False

    @property
    def example(self) -> str:
        return f"{self.before_key}<parameter-name>{self.colon}<value>{self.after_value}{self.separator}..."

    @property
    def literals(self) -> tuple[str, ...]:
        return (self.before_key, self.colon, self.separator, self.syntax.quote, self.after_value)

    def read(self, source: Source, sink: Sink, schema: Schema, tail: str) -> Steps[bool]:
        begun = False
        sink.arguments("{")
        try:
            while not (yield from comes(source, tail)):
                if begun and not (yield from source.loosely(self.separator)):
                    return False
                if begun and (yield from comes(source, tail)):
                    break
                yield from self._read_entry(source, sink, begun)
                begun = True
        except Unreadable:
            return False
        sink.arguments("}")
        return True

    def _read_entry(self, source: Source, sink: Sink, begun: bool) -> Steps[None]:
        bare = self.before_key.strip("\"' \n\t")
        if bare and not (yield from source.loosely(bare)):
            raise Unreadable
        core = self.colon.strip("\"' \n\t")
        key = yield from self.syntax.key(source, (core,))
        if not (yield from source.loosely(core)):
            raise Unreadable
        sink.arguments(f"{', ' if begun else ''}{strict_json.write(key)}: ")
        quote = self.syntax.quote
        if len(quote) > 1 and self.syntax.raw and (yield from source.follows(quote)):
            yield from _pass_string(source, sink, quote)
        else:
            sink.arguments(strict_json.write((yield from self.syntax.read(source))))
        if self.after_value.strip() and not (yield from source.loosely(self.after_value)):
            raise Unreadable

    def rule(self, tool: Tool, rules: Rules) -> list[str]:
        writer = self.writer(rules)
        entries = []
        found = properties(tool)
        for name, node, required in sorted(found, key=_name) if self.sort else found:
            begin, end = rules.pieces(self.before_key + name + self.colon), rules.pieces(self.after_value)
            entries.append((" ".join([*begin, writer.value(node), *end]), required))
        return separated(entries, " ".join(rules.pieces(self.separator)))

    def writer(self, rules: Rules) -> LiteralRules:
        """Writes the rules of values. What stands inside other values has the words and quotes of these."""
        own = len(self.syntax.quote) > 1
        colon, comma = (self.colon, self.separator) if own else (": ", ", ")
        return LiteralRules(rules, self.words, self.syntax.quote, self.syntax.raw, own, colon, comma, sort=self.sort)


def in_order(schema: Any) -> Any:
    """A schema with all properties in the order of the alphabet."""
    if isinstance(schema, Mapping):
        ordered = {name: in_order(value) for name, value in schema.items()}
        if isinstance(ordered.get("properties"), dict):
            ordered["properties"] = dict(sorted(ordered["properties"].items()))
        return ordered
    return [in_order(one) for one in schema] if isinstance(schema, list) else schema


def _name(found: tuple[str, SchemaNode, bool]) -> str:
    return found[0]


def comes(source: Source, literal: str) -> Steps[bool]:
    """Whether a literal comes next. Takes nothing."""
    if not literal.strip():
        return not (yield from source.word())
    place = source.here()
    found = yield from source.loosely(literal)
    if found:
        source.back(place)
    return found


def _pass_string(source: Source, sink: Sink, end: str) -> Steps[None]:
    """Pass on text as a JSON string while it comes, up to `end`."""
    sink.arguments('"')
    while (place := source.text.find(end)) < 0:
        if source.closed:
            raise Unreadable
        sink.arguments(escaped(source.take(len(source.text) - held_back(source.text, (end,)))))
        yield
    sink.arguments(escaped(source.take(place)) + '"')
    source.take(len(end))


def escaped(text: str) -> str:
    return strict_json.write(text)[1:-1]
