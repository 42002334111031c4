"""The grammar that holds an answer: to a requested format, to calls of tools, or to one of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from quire.engine.text.structured import Structured
from quire.engine.types import Grammar
from quire.server.formats.grammars import after_thinking, either, framed
from quire.server.formats.message import MessageFormat
from quire.server.resolve.tools import ToolUse
from quire.server.served_model import ServedModel

OPEN = "X-Schema-Open"
"""The header that names schemas with objects that stay open, because it cannot be decided what they are merged of."""
WEAKENED = "X-Schema-Weakened"
"""The header that names tools whose calls are held to less than their schema says, as no grammar holds all of it."""
_MOST_PLACES = 20


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """What an answer's grammar is made of."""

    tools: ToolUse
    asked: tuple[str, Structured] | None = None
    """The requested format, and the parameter that asks for it."""
    message: MessageFormat | None = None
    framed: bool = True
    """Content has what the model writes around it in a chat."""

    def grammars(self, model: ServedModel) -> list[tuple[str, Grammar]]:
        """Grammars to check, each with its parameter; answers must match the last one. Empty: they are any text.

        If the model must call tools, there is no content, so a requested format is ignored. If it may call tools and a
        format is requested, an answer is either calls or content in that format. Raises InvalidRequest.
        """
        first: list[tuple[str, Grammar]] = []
        frame = model.formats.frame if self.framed else None
        asked = None if self.asked is None else (self.asked[0], self.asked[1].grammar)
        call = self.tools.grammar(model.tokenizer, alone=asked is not None)
        if call is not None:
            if asked is not None and not self.tools.must_call:
                first = [asked]  # by itself, so that an error names its parameter and not `tools`
                call = either(framed(asked[1], frame, model.tokenizer), call)
            asked = "tools", call
        elif asked is not None:
            asked = asked[0], framed(asked[1], frame, model.tokenizer)
        if asked is None:
            return []
        if self.message is not None and self.message.reasoning is not None:
            asked = asked[0], after_thinking(asked[1], self.message.reasoning, self.message.begun, model.tokenizer)
        return [*first, asked]

    def headers(self) -> dict[str, str]:
        """What the answer's headers say of its schemas."""
        open_places = [] if self.asked is None else [_place(self.asked[0], one) for one in self.asked[1].open]
        open_places += [_place(place, one) for place, several in self.tools.open.items() for one in several]
        found = {OPEN: open_places, WEAKENED: self.tools.weakened}
        return {name: ", ".join(places[:_MOST_PLACES]) for name, places in found.items() if places}

    def weaker(self, levels: Mapping[str, int]) -> AnswerGrammar:
        """The same with weaker schemas of some tools: see ToolUse.weaker."""
        return replace(self, tools=self.tools.weaker(levels))


def _place(param: str, pointer: str) -> str:
    """A place as a header can hold it."""
    shown = f"{param}#{pointer}" if pointer else param
    return "".join(char if char.isascii() and char.isprintable() and char != "," else "?" for char in shown[:200])
