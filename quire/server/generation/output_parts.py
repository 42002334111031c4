"""An answer's ordered parts (reasoning, text, tool calls), and whole answers collected from deltas."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from quire.engine.common.errors import InvalidRequest, Overloaded
from quire.engine.common.types import TokenLogprob
from quire.server.generation.choice_state import AnswerToken, ChoiceDelta

MAX_LOGPROBS = 2**20
"""Limit for a whole answer, or for a stream that repeats them at the end. This many take about 140 MB."""
MAX_LOGPROBS_IN_ALL = 2**21


PartKind = Literal["reasoning", "text", "call"]


@dataclass(slots=True, eq=False)
class OutputPart:
    """Anthropic's content block, or an item of OpenAI's Responses API."""

    kind: PartKind
    call_id: str = ""
    function_name: str = ""
    text_pieces: list[str] = field(default_factory=list)
    tokens: list[AnswerToken] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.text_pieces)


class OutputParts:
    def __init__(self) -> None:
        self.parts: list[OutputPart] = []
        self._pending_tokens: list[AnswerToken] = []

    def add_delta_and_iter_pieces(self, delta: ChoiceDelta) -> Iterator[tuple[OutputPart, str]]:
        """A new part ends the previous one."""
        continued = 0
        while (
            continued < len(delta.tool_calls) and delta.tool_calls[continued].name is None
        ):  # the rest of a call that precedes text
            yield self._append_piece(self.parts[-1], delta.tool_calls[continued].arguments)
            continued += 1
        if delta.reasoning:
            yield self._append_piece(self._get_or_add_part("reasoning"), delta.reasoning)
        self._pending_tokens += delta.tokens
        if delta.text:
            part = self._get_or_add_part("text")
            part.tokens += self._pending_tokens
            self._pending_tokens = []
            yield self._append_piece(part, delta.text)
        for call in delta.tool_calls[continued:]:
            if call.name is not None:
                self.parts.append(OutputPart("call", call.id or "", call.name))
            yield self._append_piece(self.parts[-1], call.arguments)

    def _get_or_add_part(self, kind: PartKind) -> OutputPart:
        if not self.parts or self.parts[-1].kind != kind:
            self.parts.append(OutputPart(kind))
        return self.parts[-1]

    def _append_piece(self, part: OutputPart, piece: str) -> tuple[OutputPart, str]:
        if piece:
            part.text_pieces.append(piece)
        return part, piece

    def joined_text(self, kind: PartKind) -> str:
        return "".join(piece for part in self.parts if part.kind == kind for piece in part.text_pieces)


@dataclass(slots=True)
class CollectedChoice:
    index: int
    parts: OutputParts = field(default_factory=OutputParts)
    tokens: list[AnswerToken] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] = field(default_factory=list)
    prompt_ids: Sequence[int] | None = None
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None

    @property
    def text(self) -> str:
        return self.parts.joined_text("text")

    @property
    def reasoning(self) -> str:
        return self.parts.joined_text("reasoning")


class LogprobBudget:
    """Counts the log probabilities that are held in memory for whole answers, and for streams that repeat them at the
    end.
    """

    def __init__(self) -> None:
        self._logprobs_by_call: dict[object, int] = {}
        self._total_logprobs = 0

    @contextmanager
    def track_call(self) -> Iterator[Callable[[Sequence[ChoiceDelta]], None]]:
        """The yielded function raises InvalidRequest if this call holds too many, and Overloaded if all calls together
        do and this one holds the most.
        """
        call_key = object()
        self._logprobs_by_call[call_key] = 0

        def count_logprobs(step: Sequence[ChoiceDelta]) -> None:
            tokens = [token for delta in step for token in delta.tokens]
            more = sum(1 + len(token.logprob.top) for token in tokens if token.logprob is not None)
            self._logprobs_by_call[call_key] += more
            self._total_logprobs += more
            if self._logprobs_by_call[call_key] > MAX_LOGPROBS:
                raise InvalidRequest(
                    f"the answer has more than {MAX_LOGPROBS} log probabilities: ask for fewer, or stream a chat",
                    param="logprobs",
                )
            if self._total_logprobs > MAX_LOGPROBS_IN_ALL and self._logprobs_by_call[call_key] == max(
                self._logprobs_by_call.values()
            ):
                raise Overloaded("Other answers with log probabilities use all the memory reserved for them")

        try:
            yield count_logprobs
        finally:
            self._total_logprobs -= self._logprobs_by_call.pop(call_key)


async def collect_choices(
    steps: AsyncIterator[list[ChoiceDelta]], count_step: Callable[[Sequence[ChoiceDelta]], None]
) -> list[CollectedChoice]:
    """Returns choices by index."""
    answers: dict[int, CollectedChoice] = {}
    async for step in steps:
        count_step(step)
        for delta in step:
            answer = answers.setdefault(delta.index, CollectedChoice(delta.index))
            for _ in answer.parts.add_delta_and_iter_pieces(delta):
                pass
            answer.tokens += delta.tokens
            answer.finish_reason = delta.finish_reason
            answer.stop_reason = delta.stop_reason
            answer.token_ids += delta.token_ids
            answer.prompt_ids = answer.prompt_ids if delta.prompt_ids is None else delta.prompt_ids
            answer.prompt_logprobs = delta.prompt_logprobs or answer.prompt_logprobs
    return [answers[index] for index in sorted(answers)]
