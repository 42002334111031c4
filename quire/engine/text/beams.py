"""Beam search as in vLLM: the candidates are each beam's 2 * width likeliest tokens. A beam's score is its summed log
probability over length ** length_penalty (Wu et al., 2016), with the length in generated tokens, as in transformers.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from quire.engine.common.types import EngineCoreOutput, TokenLogprob


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    cumulative_logprob: float = 0.0
    is_finished: bool = False

    def extend(self, logprob: TokenLogprob, is_finished: bool) -> Beam:
        cumulative_logprob = self.cumulative_logprob + logprob.logprob
        return Beam((*self.token_ids, logprob.token_id), (*self.logprobs, logprob), cumulative_logprob, is_finished)


@dataclass(slots=True)
class BeamSearchState:
    beam_width: int
    num_logprobs: int
    stop_token_ids: Collection[int]
    length_penalty: float
    max_tokens: int
    running_beams: list[Beam] = field(default_factory=lambda: [Beam()])
    completed_beams: list[Beam] = field(default_factory=list)

    def advance_and_check_running(self, outputs: Sequence[EngineCoreOutput]) -> bool:
        """`outputs`: one token per running beam."""
        self.running_beams, ended = expand_to_best_and_ended(
            self.running_beams, outputs, self.beam_width, self.num_logprobs, self.stop_token_ids
        )
        self.completed_beams = sorted(self.completed_beams + ended, key=self._score, reverse=True)[: self.beam_width]
        worst = self._score(self.completed_beams[-1]) if len(self.completed_beams) == self.beam_width else -math.inf
        if all(self._score_bound(beam) <= worst for beam in self.running_beams):
            self.running_beams = []
        return bool(self.running_beams)

    @property
    def best_beams_so_far(self) -> list[Beam]:
        return sorted(self.completed_beams + self.running_beams, key=self._score, reverse=True)[: self.beam_width]

    def _score(self, beam: Beam) -> float:
        return beam.cumulative_logprob / max(1, len(beam.token_ids)) ** self.length_penalty

    def _score_bound(self, beam: Beam) -> float:
        """Further log probabilities are at most 0."""
        return max(
            beam.cumulative_logprob / length**self.length_penalty
            for length in (len(beam.token_ids) + 1, self.max_tokens)
        )


def expand_to_best_and_ended(
    beams: Sequence[Beam],
    outputs: Sequence[EngineCoreOutput],
    beam_width: int,
    num_logprobs: int,
    stop_token_ids: Collection[int],
) -> tuple[list[Beam], list[Beam]]:
    """Returns the best continuations, best first, and all beams that end. Outputs need 2 * width alternatives."""
    candidates = [
        (beam.cumulative_logprob + value, beam, token, value, rank)
        for beam, output in zip(beams, outputs, strict=True)
        for rank, (token, value) in enumerate(top_logprobs(output)[: 2 * beam_width], 1)
    ]
    logprobs_by_beam = {beam: top_logprobs(output)[:num_logprobs] for beam, output in zip(beams, outputs, strict=True)}

    def make_beam(candidate: tuple[float, Beam, int, float, int], ended: bool) -> Beam:
        _, beam, token, value, rank = candidate
        return beam.extend(TokenLogprob(token, value, rank, logprobs_by_beam[beam]), ended)

    unfinished = [candidate for candidate in candidates if candidate[2] not in stop_token_ids]
    best = heapq.nlargest(beam_width, unfinished, key=itemgetter(0))
    ended = [candidate for candidate in candidates if candidate[2] in stop_token_ids]
    return [make_beam(each, ended=False) for each in best], [make_beam(each, ended=True) for each in ended]


def top_logprobs(output: EngineCoreOutput) -> list[tuple[int, float]]:
    assert output.logprobs is not None, "beam search needs them"
    return output.logprobs[0].top
