from __future__ import annotations

import json
import re
from collections.abc import Sequence

from quire.server.formats.call_forms.call_form_texts import CallFormTexts, marker_prefix
from quire.server.formats.call_forms.lark_rules import LarkRules
from quire.server.formats.call_forms.slots import (
    ID_SLOT,
    INDEX_SLOT,
    NAME_SLOT,
    SLOT_PATTERN,
    common_prefix_by_atoms,
    split_into_atoms,
)
from quire.server.formats.tools.lark_calls import quote_lark_string
from quire.server.formats.tools.tool_parser import LiteralEncoder, Tool

ID_REGEX, INDEX_REGEX = "/[A-Za-z0-9_.:-]{1,64}/", "/[0-9]{1,3}/"


class CallFormGrammarWriter:
    def __init__(self, form: CallFormTexts, markers: Sequence[str], token: LiteralEncoder) -> None:
        self._form = form
        self._markers = markers
        self._rules = LarkRules(token)

    def write_grammar(self, tools: Sequence[Tool], many: bool, *, must_call: bool) -> str:
        form = self._form
        rules = self._rules
        first = self._form.opening_after_prompt
        opening = rules.split_literal(first.lstrip())
        calls = [self._call_expression_sequence(tool) for tool in tools]
        space = form.tail[len(form.tail.rstrip()) :]  # optional after the last call
        between = " ".join(rules.split_literal(space + form.between + form.fixed_head))
        more = f"( {between} call )*" if many and form.allows_many else ""
        end = " ".join(rules.split_literal((space + form.end).rstrip()))
        ended, after = "", space + form.end
        after = after[len(after.rstrip()) :] + form.turn_end
        for part in reversed(re.findall(r"\s+|\S+", after)):
            for piece in reversed(rules.split_literal(part)):  # the model may stop after any token of this text
                ended = f"( {piece} {ended} )?"
        rest = f"call {more} {end} {ended}"
        space = first[: len(first) - len(first.lstrip())]
        start = self._required_start_rule(space) if must_call else self._optional_start_rule(opening, rest)
        lines = [" ".join([start, *opening, rest]) if must_call else start]
        lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(calls))))
        lines += [f"call_{index}: {' '.join(call)}" for index, call in enumerate(calls)]
        return "\n".join(lines) + "\n" + rules.render_rules()

    def _required_start_rule(self, space: str) -> str:
        form, rules = self._form, self._rules
        empty = " ".join(rules.split_literal(form.content_begin + form.content_end)) if form.content_end else ""
        return " ".join(
            ["start:", *(f"( {one} )?" for one in (empty, quote_lark_string(space) if space else "") if one)]
        )

    def _optional_start_rule(self, opening: Sequence[str], rest: str) -> str:
        form = self._form
        rules = self._rules
        first = self._form.opening_after_prompt
        whole = " ".join([*opening, rest])
        anything = "TEXT: /(?s:.*)/"
        if form.content_begin and not form.has_distinct_marker:
            space = first[: len(first) - len(first.lstrip())]
            framed, bare = form.content_begin.lstrip(), first.lstrip()
            shared = common_prefix_by_atoms(framed, bare)
            texts = (shared, framed[len(shared) :], bare[len(shared) :])
            both, content, calls = (" ".join(rules.split_literal(one)) for one in texts)
            may = f"( {quote_lark_string(space)} )?" if space else ""
            return f"start: {may} {both} ( {content} TEXT | {calls} {rest} )\n{anything}"
        frame, end = (" ".join(rules.split_literal(one)) for one in (form.content_begin, form.content_end))
        frame, end = f"( {frame} )?" if frame else "", f"( {end} )?" if end else ""
        if not form.has_distinct_marker:
            begins = " | ".join(" ".join(rules.literal_parts(one)) for one in dict.fromkeys((first, first.lstrip())))
            return f"start: TEXT | ( {begins} ) {rest}\nTEXT: /(?s:.*)/ & ~/({self._call_start_regex()})(?s:.*)/"
        if opening[0].startswith("<["):
            return f"start: {frame} TEXT {end} ( {whole} )?\n{anything}"
        literal = json.loads(opening[0])
        marker = self._markers[0] if literal.startswith(self._markers[0]) else literal
        after = " ".join(
            [*([quote_lark_string(literal[len(marker) :])] if literal != marker else []), *opening[1:], rest]
        )
        lead = f"lead[suffix={quote_lark_string(marker)}]: /(?s:.*)/"
        return f"start: {frame} TEXT {end} | {frame} lead {after}\n{lead}\n{anything}"

    def _call_expression_sequence(self, tool: Tool) -> list[str]:
        form = self._form
        head, tail = form.head[len(form.fixed_head) :], form.tail.rstrip()
        return [
            *self._slotted_text_expressions(head, tool),
            *form.arguments.lark_expressions(tool, self._rules),
            *self._slotted_text_expressions(tail, tool),
        ]

    def _slotted_text_expressions(self, literal: str, tool: Tool) -> list[str]:
        if self._form.named_ids:
            literal = literal.replace(ID_SLOT, f"functions.{tool.name}:{INDEX_SLOT}")
        expressions = []
        for piece in SLOT_PATTERN.split(literal.replace(NAME_SLOT, tool.name)):
            expressions += (
                [ID_REGEX]
                if piece == ID_SLOT
                else [INDEX_REGEX]
                if piece == INDEX_SLOT
                else self._rules.split_literal(piece)
            )
        return expressions

    def _call_start_regex(self) -> str:
        """An answer that begins with a match is not text."""
        start = marker_prefix(self._form.opening_after_prompt)
        return r"\s*" + r"\s*".join(map(re.escape, split_into_atoms(start)[:3]))
