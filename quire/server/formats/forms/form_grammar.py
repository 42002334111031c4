"""Writes a Lark grammar that allows calls in a form, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from quire.server.formats.forms.form_texts import FormTexts, first_words
from quire.server.formats.forms.literal_rules import Rules
from quire.server.formats.forms.slots import ID, INDEX, NAME, SLOTS, atoms, common_prefix
from quire.server.formats.tools.format import Token, Tool
from quire.server.formats.tools.lark import text

ID_RULE, INDEX_RULE = "/[A-Za-z0-9_.:-]{1,64}/", "/[0-9]{1,3}/"


class FormGrammar:
    """Writes one grammar."""

    def __init__(self, form: FormTexts, markers: Sequence[str], token: Token) -> None:
        self._form = form
        self._markers = markers
        self._rules = Rules(token)

    def written(self, tools: Sequence[Tool], many: bool, *, must: bool) -> str:
        """As ToolFormat.grammar."""
        form, rules, first = self._form, self._rules, self._form.first
        opening = rules.pieces(first.lstrip())
        calls = [self._call_rule(tool) for tool in tools]
        space = form.tail[len(form.tail.rstrip()) :]  # behind the last call it may be missing
        between = " ".join(rules.pieces(space + form.between + form.fixed))
        more = f"( {between} call )*" if many and form.many else ""
        end = " ".join(rules.pieces((space + form.end).rstrip()))
        ended, after = "", space + form.end
        after = after[len(after.rstrip()) :] + form.turn_end
        for part in reversed(re.findall(r"\s+|\S+", after)):
            for piece in reversed(rules.pieces(part)):  # the model may stop at any token of it
                ended = f"( {piece} {ended} )?"
        rest = f"call {more} {end} {ended}"
        space = first[: len(first) - len(first.lstrip())]
        start = self._must_start(space) if must else self._start(opening, rest)
        lines = [" ".join([start, *opening, rest]) if must else start]
        lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(calls))))
        lines += [f"call_{index}: {' '.join(call)}" for index, call in enumerate(calls)]
        return "\n".join(lines) + "\n" + rules.written()

    def _must_start(self, space: str) -> str:
        """The beginning of the start rule where calls must be made: empty content, and white space."""
        form, rules = self._form, self._rules
        empty = " ".join(rules.pieces(form.content_begin + form.content_end)) if form.content_end else ""
        return " ".join(["start:", *(f"( {one} )?" for one in (empty, text(space) if space else "") if one)])

    def _start(self, opening: Sequence[str], rest: str) -> str:
        """The start rule where an answer may be text, in which calls follow the `opening`, and the rules it needs."""
        form, rules, first = self._form, self._rules, self._form.first
        whole = " ".join([*opening, rest])
        anything = "TEXT: /(?s:.*)/"
        if form.content_begin and not form.strong:
            space = first[: len(first) - len(first.lstrip())]
            framed, bare = form.content_begin.lstrip(), first.lstrip()
            shared = common_prefix(framed, bare)
            texts = (shared, framed[len(shared) :], bare[len(shared) :])
            both, content, calls = (" ".join(rules.pieces(one)) for one in texts)
            may = f"( {text(space)} )?" if space else ""
            return f"start: {may} {both} ( {content} TEXT | {calls} {rest} )\n{anything}"
        frame, end = (" ".join(rules.pieces(one)) for one in (form.content_begin, form.content_end))
        frame, end = f"( {frame} )?" if frame else "", f"( {end} )?" if end else ""
        if not form.strong:
            begins = " | ".join(" ".join(rules.parts(one)) for one in dict.fromkeys((first, first.lstrip())))
            return f"start: TEXT | ( {begins} ) {rest}\nTEXT: /(?s:.*)/ & ~/({self._unlike()})(?s:.*)/"
        if opening[0].startswith("<["):
            return f"start: {frame} TEXT {end} ( {whole} )?\n{anything}"
        literal = json.loads(opening[0])
        marker = self._markers[0] if literal.startswith(self._markers[0]) else literal
        after = " ".join([*([text(literal[len(marker) :])] if literal != marker else []), *opening[1:], rest])
        lead = f"lead[suffix={text(marker)}]: /(?s:.*)/"
        return f"start: {frame} TEXT {end} | {frame} lead {after}\n{lead}\n{anything}"

    def _call_rule(self, tool: Tool) -> list[str]:
        form = self._form
        head, tail = form.head[len(form.fixed) :], form.tail.rstrip()
        return [*self._slots(head, tool), *form.arguments.rule(tool, self._rules), *self._slots(tail, tool)]

    def _slots(self, literal: str, tool: Tool) -> list[str]:
        if self._form.named_ids:
            literal = literal.replace(ID, f"functions.{tool.name}:{INDEX}")
        found = []
        for piece in SLOTS.split(literal.replace(NAME, tool.name)):
            found += [ID_RULE] if piece == ID else [INDEX_RULE] if piece == INDEX else self._rules.pieces(piece)
        return found

    def _unlike(self) -> str:
        """A regular expression of how an answer begins that is calls, and not text."""
        start = first_words(self._form.first)
        return r"\s*" + r"\s*".join(map(re.escape, atoms(start)[:3]))
