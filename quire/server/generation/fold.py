"""The parts of an answer (thinking, text and tool calls) in the order in which the model wrote them; and whole answers,
which are collected from the deltas that a stream would have shown."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from quire.engine.errors import InvalidRequest, Overloaded
from quire.engine.types import TokenLogprob
from quire.server.generation.choice import ChoiceDelta, TokenText

MAX_LOGPROBS = 2**20
"""Log probabilities that one answer may hold, if it is whole or a stream whose last events repeat them. This many
take some 140 MB."""
MAX_LOGPROBS_IN_ALL = 2**21
"""Of all answers together."""


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


@dataclass(slots=True)
class Answer:
    """A whole choice. `fold` fills it in delta by delta."""

    index: int
    parts: Parts = field(default_factory=Parts)
    tokens: list[TokenText] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] = field(default_factory=list)
    prompt_ids: Sequence[int] | None = None
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None

    @property
    def text(self) -> str:
        return self.parts.text("text")

    @property
    def reasoning(self) -> str:
        return self.parts.text("reasoning")


class LogprobBudget:
    """Counts the log probabilities that answers hold in this process until they are sent: whole answers, and streams
    whose last events repeat them."""

    def __init__(self) -> None:
        self._calls: dict[object, int] = {}
        self._total = 0

    @contextmanager
    def call(self) -> Iterator[Callable[[Sequence[ChoiceDelta]], None]]:
        """Gives a function that counts a step of one call. It raises InvalidRequest for a call that holds too many,
        and Overloaded for the one that holds most when all together do."""
        call = object()
        self._calls[call] = 0

        def count(step: Sequence[ChoiceDelta]) -> None:
            tokens = [token for delta in step for token in delta.tokens]
            more = sum(1 + len(token.logprob.top) for token in tokens if token.logprob is not None)
            self._calls[call] += more
            self._total += more
            if self._calls[call] > MAX_LOGPROBS:
                raise InvalidRequest(
                    f"the answer came to more than {MAX_LOGPROBS} log probabilities: ask for fewer, or stream a chat",
                    param="logprobs",
                )
            if self._total > MAX_LOGPROBS_IN_ALL and self._calls[call] == max(self._calls.values()):
                raise Overloaded("Other answers with log probabilities take the memory that is set aside for them")

        try:
            yield count
        finally:
            self._total -= self._calls.pop(call)


async def fold(steps: AsyncIterator[list[ChoiceDelta]], count: Callable[[Sequence[ChoiceDelta]], None]) -> list[Answer]:
    """The whole answers, by index. `count` is called with each step, and may raise."""
    answers: dict[int, Answer] = {}
    async for step in steps:
        count(step)
        for delta in step:
            answer = answers.setdefault(delta.index, Answer(delta.index))
            for _ in answer.parts.add(delta):
                pass
            answer.tokens += delta.tokens
            answer.finish_reason = delta.finish_reason
            answer.stop_reason = delta.stop_reason
            answer.token_ids += delta.token_ids
            answer.prompt_ids = answer.prompt_ids if delta.prompt_ids is None else delta.prompt_ids
            answer.prompt_logprobs = delta.prompt_logprobs or answer.prompt_logprobs
    return [answers[index] for index in sorted(answers)]
