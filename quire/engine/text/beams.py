"""Beam search's rule: hypotheses, their scores, and which of them go on.

It is vLLM's: the 2 * width most likely tokens of every beam are candidates; those that end a sequence complete it, the
width best of the others go on. A hypothesis scores its summed log probability over length ** length_penalty (Wu et al.,
2016); the length is what was generated, as in transformers.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from quire.engine.types import EngineCoreOutput, TokenLogprob


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A hypothesis: its tokens behind the prompt."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    total: float = 0.0
    """The sum of the log probabilities."""
    ended: bool = False

    def then(self, logprob: TokenLogprob, ended: bool) -> Beam:
        total = self.total + logprob.logprob
        return Beam((*self.ids, logprob.token_id), (*self.logprobs, logprob), total, ended)


@dataclass(slots=True)
class Search:
    width: int
    shown: int
    """Alternatives that a beam keeps."""
    ends: Collection[int]
    """Tokens that end a sequence."""
    length_penalty: float
    longest: int
    running: list[Beam] = field(default_factory=lambda: [Beam()])
    completed: list[Beam] = field(default_factory=list)

    def advance(self, outputs: Sequence[EngineCoreOutput]) -> bool:
        """Whether the search goes on behind these, one more token of each beam that was running."""
        self.running, ended = continued(self.running, outputs, self.width, self.shown, self.ends)
        self.completed = sorted(self.completed + ended, key=self._score, reverse=True)[: self.width]
        worst = self._score(self.completed[-1]) if len(self.completed) == self.width else -math.inf
        if all(self._bound(beam) <= worst for beam in self.running):
            self.running = []
        return bool(self.running)

    @property
    def best(self) -> list[Beam]:
        """The `width` best hypotheses so far, best first."""
        return sorted(self.completed + self.running, key=self._score, reverse=True)[: self.width]

    def _score(self, beam: Beam) -> float:
        return beam.total / max(1, len(beam.ids)) ** self.length_penalty

    def _bound(self, beam: Beam) -> float:
        """A score that no continuation of the beam can exceed: each token adds a log probability, at most 0."""
        return max(beam.total / length**self.length_penalty for length in (len(beam.ids) + 1, self.longest))


def continued(
    beams: Sequence[Beam], outputs: Sequence[EngineCoreOutput], width: int, shown: int, ends: Collection[int]
) -> tuple[list[Beam], list[Beam]]:
    """The `width` best continuations that go on, best first, and all that end.

    outputs: one more token of each beam, with its 2 * width most likely alternatives at least. shown: alternatives that
    a beam keeps of them. Of the candidates, 2 * width**2, only those that are returned become beams.
    """
    candidates = [
        (beam.total + value, beam, token, value, rank)
        for beam, output in zip(beams, outputs, strict=True)
        for rank, (token, value) in enumerate(alternatives(output)[: 2 * width], 1)
    ]
    tops = {beam: alternatives(output)[:shown] for beam, output in zip(beams, outputs, strict=True)}

    def made(candidate: tuple[float, Beam, int, float, int], ended: bool) -> Beam:
        _, beam, token, value, rank = candidate
        return beam.then(TokenLogprob(token, value, rank, tops[beam]), ended)

    # All candidates are equally long: the length penalty does not change their order.
    going_on = [candidate for candidate in candidates if candidate[2] not in ends]
    best = heapq.nlargest(width, going_on, key=itemgetter(0))
    ended = [candidate for candidate in candidates if candidate[2] in ends]
    return [made(each, ended=False) for each in best], [made(each, ended=True) for each in ended]


def alternatives(output: EngineCoreOutput) -> list[tuple[int, float]]:
    """The most likely next tokens with their log probabilities."""
    assert output.logprobs is not None, "beams ask for them"
    return output.logprobs[0].top
