"""The parts of an answer in the order in which the model wrote them: thinking, text and tool calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from quire.server.generation.choice import ChoiceDelta, TokenText

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True, eq=False)
class Part:
    """What Anthropic calls a content block and OpenAI's Responses API an item."""

    kind: Kind
    id: str = ""
    """Of a call."""
    name: str = ""
    """Of the function that is called."""
    pieces: list[str] = field(default_factory=list)
    tokens: list[TokenText] = field(default_factory=list)
    """Those of a text, if log probabilities were asked for."""

    @property
    def text(self) -> str:
        """The thinking, the text, or the arguments as JSON."""
        return "".join(self.pieces)


class Parts:
    """Collects the parts of one choice, delta by delta."""

    def __init__(self) -> None:
        self.all: list[Part] = []
        self._tokens: list[TokenText] = []
        """Tokens whose text is still to come."""

    def add(self, delta: ChoiceDelta) -> Iterator[tuple[Part, str]]:
        """The pieces that a delta has, each with its part, to which it was added. A new part is over the last one."""
        continued = 0
        while continued < len(delta.calls) and delta.calls[continued].name is None:  # of a call that text ends
            yield self._added(self.all[-1], delta.calls[continued].arguments)
            continued += 1
        if delta.reasoning:
            yield self._added(self._last("reasoning"), delta.reasoning)
        self._tokens += delta.tokens
        if delta.text:
            part = self._last("text")
            part.tokens += self._tokens
            self._tokens = []
            yield self._added(part, delta.text)
        for call in delta.calls[continued:]:
            if call.name is not None:
                self.all.append(Part("call", call.id or "", call.name))
            yield self._added(self.all[-1], call.arguments)

    def _last(self, kind: Kind) -> Part:
        """The last part if it is of this kind, else a new one behind it."""
        if not self.all or self.all[-1].kind != kind:
            self.all.append(Part(kind))
        return self.all[-1]

    def _added(self, part: Part, piece: str) -> tuple[Part, str]:
        if piece:
            part.pieces.append(piece)
        return part, piece

    def text(self, kind: Kind) -> str:
        """All of one kind, joined."""
        return "".join(piece for part in self.all if part.kind == kind for piece in part.pieces)
