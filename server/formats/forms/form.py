"""A tool format made of data: the texts around calls, names and arguments, as a chat template shows them."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

from quire.server.formats.forms.arguments import Arguments
from quire.server.formats.forms.literal_rules import Rules
from quire.server.formats.forms.slots import ID, INDEX, NAME, SLOTS, START, TAG, atoms, common_prefix
from quire.server.formats.tools.format import Token, Tool, ToolFormat, Tools
from quire.server.formats.tools.json_calls import JsonKeys, read_call
from quire.server.formats.tools.lark import text
from quire.server.formats.tools.sink import Sink
from quire.server.formats.tools.source import Source, Steps

ID_RULE, INDEX_RULE = "/[A-Za-z0-9_.:-]{1,64}/", "/[0-9]{1,3}/"
CALL_NAME = re.compile(r"[\w.:-][\w.:/-]*")
MARK = re.compile(rf"{TAG.pattern}|<\w|[A-Z_]{{3}}\]")
"""What tells that a marker is none by chance: a tag, or how one begins."""
WRITTEN_ID = re.compile(r"[\w.:-]{1,64}")
ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class CallForm(ToolFormat):
    """What stands where in a turn with calls. Texts may hold the characters for a call's NAME, ID and INDEX."""

    begin: str
    """Before the first call."""
    head: str
    """From the beginning of each call to its arguments."""
    arguments: Arguments
    tail: str
    """From the arguments to the end of each call."""
    between: str
    """Between two calls."""
    end: str
    """Behind the last call."""
    many: bool = True
    """False: the template shows one call in a turn."""
    given: str = ""
    """The part of the first call's head that the prompt ends with."""
    turn_end: str = ""
    """What ends a turn with calls; a model may write it, or stop before it."""
    keys: JsonKeys | None = None
    """If a call is a JSON object with its name and arguments: how that names them. It is read in any order of keys."""
    content_begin: str = ""
    content_end: str = ""
    """What the model writes around content."""
    named_ids: bool = False
    """The name stands in the id and nowhere else: `functions.name:0`."""
    short_ids: bool = False
    """The template refuses ids that are not nine letters and digits."""
    first_index: int = 0
    other_heads: tuple[str, ...] = ()
    """Heads that are read too, and that a grammar does not allow."""

    @cached_property
    def opening(self) -> str:
        """What stands before the first slot of the first call."""
        return self.begin + self._fixed

    @cached_property
    def _fixed(self) -> str:
        """The part of the head before its first slot."""
        return SLOTS.split(self.head)[0]

    @cached_property
    def _after_head(self) -> list[str]:
        """What may follow a head that ends with a slot."""
        found = [atoms(one.strip())[:1] for one in (self.arguments.before_key, self.tail, self.end, self.turn_end)]
        return [one[0] for one in found if one] or ["{"]

    @cached_property
    def strong(self) -> bool:
        """Whether calls begin with a mark that other text will not have. If not, names must be those of tools."""
        marker = first_words(self.opening.removeprefix(self.given))
        return MARK.search(marker) is not None or (self.keys is not None and _letters(marker) > 4)

    @cached_property
    def markers(self) -> tuple[str, ...]:  # type: ignore[override]
        """The texts that calls begin with, wherever they stand."""
        found = [first_words(self.opening), *map(first_words, self.other_heads)]
        if self.begin.strip() and TAG.search(self._fixed):
            found.append(first_words(self._fixed))
        found = [
            one
            for one in found
            if one and (MARK.search(one) or (_letters(one) > 2 and one[0] not in '{"') or self.given)
        ]
        return tuple(dict.fromkeys(found))

    @property
    def literals(self) -> tuple[str, ...]:
        around = (self.begin, self.head, self.tail, self.between, self.end)
        return (*around, self.content_begin, self.content_end, *self.arguments.literals)

    @cached_property
    def example(self) -> str:  # type: ignore[override]
        whole = self.begin + self.head + self.arguments.example + self.tail + self.end
        return whole.replace(ID, "<id>").replace(NAME, "<function-name>").replace(INDEX, str(self.first_index))

    def new_id(self, name: str) -> str:
        if self.short_ids:
            digest = blake2b(name.encode(), digest_size=9).digest()
            return "".join(ID_CHARACTERS[byte % len(ID_CHARACTERS)] for byte in digest)
        return super().new_id(name)

    def parse(self, source: Source, sink: Sink, tools: Tools, *, in_blocks: bool = False) -> Steps[None]:
        if self.given or not self.strong:
            source.mark("")
            if not (yield from self.read_calls(source, sink, tools, "")):
                sink.content(source.taken)
        if self.markers or in_blocks:
            yield from super().parse(source, sink, tools, in_blocks=in_blocks)
        else:
            yield from _pass_rest(source, sink)

    def read_calls(self, source: Source, sink: Sink, tools: Tools, marker: str) -> Steps[bool]:
        source.back(0)
        if not self.strong and not marker and not (yield from source.loosely(self.begin)):
            return False
        for atom in words(self.begin) if marker else ():
            yield from source.follows(atom)
        head = self.head if marker else self.head.removeprefix(self.given)
        read = 0
        while (yield from self._read_call(source, sink, tools, head)):
            read += 1
            source.mark("")
            if not sink.last_complete:
                return True
            head = self.head
            for atom in words(self.between):
                yield from source.follows(atom)
        source.back(0)
        if not read:
            source.take(len(marker))
            return False
        for atom in words(self.end + self.turn_end):
            yield from source.follows(atom)
        return True

    def _read_call(self, source: Source, sink: Sink, tools: Tools, head: str) -> Steps[bool]:
        names = None if self.strong else tools
        if self.keys is not None and (yield from self._read_object(source, sink, names, self.keys, head)):
            return True
        given = self.given if head != self.head else ""
        heads = [other.removeprefix(given) for other in self.other_heads] + ([] if self.keys is not None else [head])
        for one in sorted(heads, key=len, reverse=True):  # a short one may fit where a long one is meant
            if (yield from self._read_parts(source, sink, tools, one)):
                return True
        return False

    def _read_object(self, source: Source, sink: Sink, names: Tools | None, keys: JsonKeys, head: str) -> Steps[bool]:
        """Read a call that is a JSON object."""
        place = source.here()
        outer = head[: head.index("{")]
        if not (yield from source.loosely(outer)) and not (self.strong and (yield from source.word()) == "{"):
            return False
        if not (yield from read_call(source, sink, names, keys)):
            source.back(place)
            return False
        yield from self._skip(source, self.tail[self.tail.rindex("}") + 1 :])
        return True

    def _read_parts(self, source: Source, sink: Sink, tools: Tools, head: str) -> Steps[bool]:
        place = source.here()
        found: dict[str, str] = {}
        pieces = SLOTS.split(head)
        for index, piece in enumerate(pieces):
            if piece == NAME and not self.strong and not (yield from _may_name(source, tools)):
                source.back(place)
                return False
            if SLOTS.fullmatch(piece):
                follows = re.findall(rf"{TAG.pattern}|\S+", pieces[index + 1])[:1]
                if not follows and pieces[index + 1]:  # names have no white space, but may have what begins arguments
                    follows = [pieces[index + 1][0], *(one for one in self._after_head if len(one) > 1)]
                follows = follows or self._after_head
                yield from source.word()
                source.take(len(source.text) - len(source.text.lstrip()))
                read = yield from source.until((*follows, "{"))  # no name has a brace
                if read is None or read[1] not in follows:
                    source.back(place)
                    return False
                source.give_back(read[1])
                found.setdefault(piece, read[0].strip())
            elif piece.strip() and not (yield from source.loosely(piece)):
                source.back(place)
                return False
        name, id = found.get(NAME, ""), found.get(ID, "")
        if self.named_ids:
            name = (id.rpartition(":")[0] or id).removeprefix("functions.")
        if CALL_NAME.fullmatch(name) is None or (not self.strong and name not in tools):
            source.back(place)
            return False
        if not (yield from self.arguments.begin(source)):
            source.back(place)
            return False
        sink.open(name, id if WRITTEN_ID.fullmatch(id) else "")
        tool, tail = tools.get(name), self.tail.replace(NAME, name)
        if (yield from self.arguments.read(source, sink, tool.parameters if tool is not None else {}, tail)):
            sink.close()
            yield from self._skip(source, tail)
        return True

    def _skip(self, source: Source, literal: str) -> Steps[None]:
        """Pass over a literal, or as much of it as is there."""
        for piece in SLOTS.split(literal):
            if piece in (ID, INDEX):
                yield from source.until(('"', "<", ",", "}"))
            for atom in words(piece):
                yield from source.follows(atom)

    def grammar(self, tools: Sequence[Tool], many: bool, token: Token, *, must: bool = True) -> str:
        rules = Rules(token)
        first = self.opening.removeprefix(self.given)
        opening = rules.pieces(first.lstrip())
        calls = [self._call_rule(tool, rules) for tool in tools]
        space = self.tail[len(self.tail.rstrip()) :]  # behind the last call it may be missing
        between = " ".join(rules.pieces(space + self.between + self._fixed))
        more = f"( {between} call )*" if many and self.many else ""
        end = " ".join(rules.pieces((space + self.end).rstrip()))
        ended, after = "", space + self.end
        after = after[len(after.rstrip()) :] + self.turn_end
        for part in reversed(re.findall(r"\s+|\S+", after)):
            for piece in reversed(rules.pieces(part)):  # the model may stop at any token of it
                ended = f"( {piece} {ended} )?"
        rest = f"call {more} {end} {ended}"
        space = first[: len(first) - len(first.lstrip())]
        start = self._must_start(space, rules) if must else self._start(opening, rest, rules)
        lines = [" ".join([start, *opening, rest]) if must else start]
        lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(calls))))
        lines += [f"call_{index}: {' '.join(call)}" for index, call in enumerate(calls)]
        return "\n".join(lines) + "\n" + rules.written()

    def _must_start(self, space: str, rules: Rules) -> str:
        """The beginning of the start rule where calls must be made: empty content, and white space."""
        empty = " ".join(rules.pieces(self.content_begin + self.content_end)) if self.content_end else ""
        return " ".join(["start:", *(f"( {one} )?" for one in (empty, text(space) if space else "") if one)])

    def _start(self, opening: Sequence[str], rest: str, rules: Rules) -> str:
        """The start rule where an answer may be text, in which calls follow the `opening`, and the rules it needs."""
        whole = " ".join([*opening, rest])
        anything = "TEXT: /(?s:.*)/"
        if self.content_begin and not self.strong:
            first = self.opening.removeprefix(self.given)
            space = first[: len(first) - len(first.lstrip())]
            framed, first = self.content_begin.lstrip(), first.lstrip()
            shared = common_prefix(framed, first)
            texts = (shared, framed[len(shared) :], first[len(shared) :])
            both, content, calls = (" ".join(rules.pieces(one)) for one in texts)
            may = f"( {text(space)} )?" if space else ""
            return f"start: {may} {both} ( {content} TEXT | {calls} {rest} )\n{anything}"
        frame, end = (" ".join(rules.pieces(one)) for one in (self.content_begin, self.content_end))
        frame, end = f"( {frame} )?" if frame else "", f"( {end} )?" if end else ""
        if not self.strong:
            first = self.opening.removeprefix(self.given)
            begins = " | ".join(" ".join(rules.parts(one)) for one in dict.fromkeys((first, first.lstrip())))
            return f"start: TEXT | ( {begins} ) {rest}\nTEXT: /(?s:.*)/ & ~/({self._unlike()})(?s:.*)/"
        if opening[0].startswith("<["):
            return f"start: {frame} TEXT {end} ( {whole} )?\n{anything}"
        literal = json.loads(opening[0])
        marker = self.markers[0] if literal.startswith(self.markers[0]) else literal
        after = " ".join([*([text(literal[len(marker) :])] if literal != marker else []), *opening[1:], rest])
        lead = f"lead[suffix={text(marker)}]: /(?s:.*)/"
        return f"start: {frame} TEXT {end} | {frame} lead {after}\n{lead}\n{anything}"

    def _call_rule(self, tool: Tool, rules: Rules) -> list[str]:
        arguments = self.arguments.rule(tool, rules)
        head, tail = self.head[len(self._fixed) :], self.tail.rstrip()
        return [*self._slots(head, tool, rules), *arguments, *self._slots(tail, tool, rules)]

    def _slots(self, literal: str, tool: Tool, rules: Rules) -> list[str]:
        if self.named_ids:
            literal = literal.replace(ID, f"functions.{tool.name}:{INDEX}")
        found = []
        for piece in SLOTS.split(literal.replace(NAME, tool.name)):
            found += [ID_RULE] if piece == ID else [INDEX_RULE] if piece == INDEX else rules.pieces(piece)
        return found

    def _unlike(self) -> str:
        """A regular expression of how an answer begins that is calls, and not text."""
        start = first_words(self.opening.removeprefix(self.given))
        return r"\s*" + r"\s*".join(map(re.escape, atoms(start)[:3]))


def _may_name(source: Source, tools: Tools) -> Steps[bool]:
    """Whether the text that comes may be the name of a tool: other text is not held back."""
    while True:
        text = source.text.lstrip()
        if any(text.startswith(name) for name in tools):
            return True
        if source.closed or not any(name.startswith(text) for name in tools):
            return False
        yield


def first_words(literal: str) -> str:
    """The beginning of a literal that tells it from other text: a tag, or all up to white space or a slot."""
    joined = SLOTS.split(literal)[0].strip()
    if (group := re.match(START, joined)) is not None:
        return group[0]
    cut = re.split(r"\s", joined)[0]
    return joined.split("\n")[0] if cut.startswith("<") else cut


def _letters(text: str) -> int:
    return sum(map(str.isalpha, text))


def words(literal: str) -> list[str]:
    """The atoms of a literal that are not white space."""
    return [atom for atom in atoms(literal) if atom.strip()]


def _pass_rest(source: Source, sink: Sink) -> Steps[None]:
    while not source.closed:
        sink.content(source.take(len(source.text)))
        yield
    sink.content(source.take(len(source.text)))
