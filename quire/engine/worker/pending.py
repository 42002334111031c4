"""The result of a launched step, while it is on its way to the host."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from quire.engine.checkpoint.pooling import Pooling
from quire.engine.core.scheduler_output import Failure, ModelRunnerOutput, ScheduledRequest
from quire.engine.layers.pooling import PooledRow, finished_rows
from quire.engine.types import TokenLogprob
from quire.engine.worker.inputs import Owner
from quire.engine.worker.sampling.grammar import SlotGrammars
from quire.engine.worker.sampling.sampler import token_logprobs, with_picked
from quire.engine.worker.sampling.sampling_rules import NOTHING_LEFT
from quire.kernels.gpu.transfer import Download


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Prompt tokens of one row whose log probabilities are wanted."""

    request_id: str
    token_ids: list[int]
    top: int


LOST = -1
"""In a picked token's place: the model's numbers were infinite or NaN, so there was nothing to pick from."""
_WHY = "its weights, or an adapter's, are broken, or too large for its type"
_FAILURES = {
    LOST: Failure(f"the model gave no finite number for the next token: {_WHY}"),
    NOTHING_LEFT: Failure(
        "the request's constraints leave no token to go on with (allowed_token_ids, bad_words, min_tokens)",
        "constraints",
    ),
}
"""By what stands in a picked token's place."""
LOGPROB_TENSORS = 4
"""How many tensors `logprob_tensors` makes of one set of logits."""


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step. `picks` has for each picked token its row, and the owner of that row's slot at the time of the
    launch. `download` has the picked tokens; then, if some are `asked` for log probabilities, what logprob_tensors
    found for these picks (`asked` has their indices); then the same for each of `chunks`; then, if there are rows
    `pooled`, the vectors of those that end."""

    picks: list[tuple[ScheduledRequest, Owner]]
    asked: list[int]
    chunks: list[PromptChunk]
    pooled: list[PooledRow]
    pooling: Pooling | None
    download: Download
    grammars: SlotGrammars
    captured: bool = False
    """Whether a CUDA graph computes it."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the device, and advance the grammars by what was picked. Call it once."""
        tensors = iter(self.download.wait())
        picked = next(tensors).tolist()
        found: list[TokenLogprob] = []
        if self.asked:
            rules = [self.picks[index][1].rules for index in self.asked]
            tops = [each.logprobs or 0 for each in rules]
            found = token_logprobs([picked[i] for i in self.asked], islice(tensors, LOGPROB_TENSORS), tops)
            found = [one if each.listed is None else with_picked(one) for one, each in zip(found, rules, strict=True)]
        token_ids, logprobs, errors = self._accept(picked, dict(zip(self.asked, found, strict=True)))
        prompt_logprobs: dict[str, list[TokenLogprob]] = {}
        for chunk in self.chunks:
            tops = [chunk.top] * len(chunk.token_ids)
            found = token_logprobs(chunk.token_ids, islice(tensors, LOGPROB_TENSORS), tops)
            prompt_logprobs[chunk.request_id] = prompt_logprobs.get(chunk.request_id, []) + found
        vectors = {}
        if self.pooling is not None and self.pooled:
            vectors = finished_rows(self.pooled, next(tensors), self.pooling)
        return ModelRunnerOutput(token_ids, logprobs, prompt_logprobs, errors, vectors, self.captured)

    def _accept(
        self, picked: list[int], found: dict[int, TokenLogprob]
    ) -> tuple[dict[str, list[int]], dict[str, list[TokenLogprob]], dict[str, Failure]]:
        """By request id: accepted tokens, their log probabilities, errors. `found` has them by index in `picked`."""
        token_ids, logprobs, errors = {}, {}, dict[str, Failure]()
        first = 0
        while first < len(picked):
            row, owner = self.picks[first]
            width = 1 + len(row.draft_token_ids)
            tokens = token_ids[row.request_id] = accepted(row.draft_token_ids, picked[first : first + width])
            if tokens[-1] in _FAILURES:
                token_ids[row.request_id], errors[row.request_id] = tokens[:-1], _FAILURES[tokens[-1]]
                first += width
                continue
            if first in found:
                logprobs[row.request_id] = [found[first + index] for index in range(len(tokens))]
            if (error := self.grammars.consume(row.slot, owner.admission, tokens)) is not None:
                errors[row.request_id] = error
            first += width
        return token_ids, logprobs, errors


def accepted(drafts: list[int], picks: list[int]) -> list[int]:
    """The picks up to and including the first that differs from its draft; there is one pick more than drafts. Later
    picks are dropped: they were computed as if that draft had been right."""
    count = 0
    while count < len(drafts) and picks[count] == drafts[count]:
        count += 1
    return picks[: count + 1]
