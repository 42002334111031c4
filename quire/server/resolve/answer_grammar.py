from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from quire.engine.common.request_params import Grammar
from quire.engine.text.structured_outputs import GrammarWithOpenObjects
from quire.server.formats.grammar_composition import add_content_delimiters, add_thinking_grammar, either_grammar
from quire.server.formats.message_parser import RequestMessageFormat
from quire.server.resolve.tool_use import RequestTools
from quire.server.served_model import ServedModel

OPEN_SCHEMA_HEADER = "X-Schema-Open"
"""Names objects in schemas that still allow undeclared properties, because it cannot be decided which properties to
forbid.
"""
WEAKENED_SCHEMA_HEADER = "X-Schema-Weakened"
"""Names tools whose calls follow only part of their schema, because no grammar can enforce all of it."""
_MAX_HEADER_LOCATIONS = 20


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    tools: RequestTools
    requested_format: tuple[str, GrammarWithOpenObjects] | None = None
    message_format: RequestMessageFormat | None = None
    has_content_delimiters: bool = True
    """True for a chat, whose grammar must allow the delimiters around content."""

    def build_grammars(self, model: ServedModel) -> list[tuple[str, Grammar]]:
        """Returns (parameter, grammar) pairs to check. Answers match the last grammar. An empty list allows any text.
        If a tool must be called, a requested format is ignored. If tools may be called, an answer is either calls or
        content in that format.
        """
        first: list[tuple[str, Grammar]] = []
        delimiters = model.chat_formats.content_delimiters if self.has_content_delimiters else None
        answer_grammar = (
            None if self.requested_format is None else (self.requested_format[0], self.requested_format[1].grammar)
        )
        call = self.tools.build_tool_grammar(model.tokenizer, calls_only=answer_grammar is not None)
        if call is not None:
            if answer_grammar is not None and not self.tools.required_tools:
                first = [answer_grammar]  # checked separately, so that errors name its parameter
                call = either_grammar(add_content_delimiters(answer_grammar[1], delimiters, model.tokenizer), call)
            answer_grammar = "tools", call
        elif answer_grammar is not None:
            answer_grammar = answer_grammar[0], add_content_delimiters(answer_grammar[1], delimiters, model.tokenizer)
        if answer_grammar is None:
            return []
        if self.message_format is not None and self.message_format.reasoning_format is not None:
            answer_grammar = (
                answer_grammar[0],
                add_thinking_grammar(
                    answer_grammar[1],
                    self.message_format.reasoning_format,
                    self.message_format.starts_in_thinking,
                    model.tokenizer,
                ),
            )
        return [*first, answer_grammar]

    def schema_headers(self) -> dict[str, str]:
        open_places = (
            []
            if self.requested_format is None
            else [_header_safe_location(self.requested_format[0], one) for one in self.requested_format[1].open_objects]
        )
        open_places += [
            _header_safe_location(place, one)
            for place, several in self.tools.open_objects_by_field.items()
            for one in several
        ]
        places_by_header = {OPEN_SCHEMA_HEADER: open_places, WEAKENED_SCHEMA_HEADER: self.tools.weakened_schema_fields}
        return {name: ", ".join(places[:_MAX_HEADER_LOCATIONS]) for name, places in places_by_header.items() if places}

    def with_weaker_tools(self, levels: Mapping[str, int]) -> AnswerGrammar:
        return replace(self, tools=self.tools.with_weaker_schemas(levels))


def _header_safe_location(param: str, pointer: str) -> str:
    shown = f"{param}#{pointer}" if pointer else param
    return "".join(char if char.isascii() and char.isprintable() and char != "," else "?" for char in shown[:200])
