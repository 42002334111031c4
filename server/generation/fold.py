"""Whole answers: the fold of the deltas that a stream would have shown."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from quire.engine.types import TokenLogprob
from quire.server.formats.tools.sink import CallDelta
from quire.server.generation.choice import ChoiceDelta, TokenText


@dataclass(slots=True)
class Answer:
    """A whole choice. `fold` fills it in delta by delta."""

    index: int
    pieces: list[str] = field(default_factory=list)
    tokens: list[TokenText] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] = field(default_factory=list)
    prompt_ids: Sequence[int] | None = None
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    reasoning_pieces: list[str] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasoning_pieces)


async def fold(steps: AsyncIterator[list[ChoiceDelta]]) -> list[Answer]:
    """The whole answers, by index."""
    answers: dict[int, Answer] = {}
    async for step in steps:
        for delta in step:
            answer = answers.setdefault(delta.index, Answer(delta.index))
            answer.pieces.append(delta.text)
            answer.tokens += delta.tokens
            answer.reasoning_pieces.append(delta.reasoning)
            answer.calls += delta.calls
            answer.finish_reason = delta.finish_reason
            answer.stop_reason = delta.stop_reason
            answer.token_ids += delta.token_ids
            answer.prompt_ids = answer.prompt_ids if delta.prompt_ids is None else delta.prompt_ids
            answer.prompt_logprobs = delta.prompt_logprobs or answer.prompt_logprobs
    return [answers[index] for index in sorted(answers)]
