"""The result of a launched step, while it is on its way to the host."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from quire.engine.batch import Row, StepOutput
from quire.engine.types import TokenLogprob
from quire.engine.worker.grammar import SlotGrammars
from quire.engine.worker.inputs import Owner
from quire.engine.worker.sampler import token_logprobs
from quire.engine.worker.transfer import Download


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Prompt tokens of one row whose log probabilities are wanted."""

    request_id: str
    token_ids: list[int]
    top: int


LOGPROB_TENSORS = 4
"""How many tensors `logprob_tensors` makes of one set of logits."""


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step. `picks` has for each picked token its row, and the owner of that row's slot at the time of the
    launch. `download` has the picked tokens; then, if some are `asked` for log probabilities, what logprob_tensors
    found for these picks (`asked` has their indices); then the same for each of `chunks`."""

    picks: list[tuple[Row, Owner]]
    asked: list[int]
    chunks: list[PromptChunk]
    download: Download
    grammars: SlotGrammars
    errors: dict[str, str]
    """By request id: why this worker cannot serve the request."""

    def result(self) -> StepOutput:
        """Wait for the device, and advance the grammars by what was picked. Call it once."""
        tensors = iter(self.download.wait())
        picked = next(tensors).tolist()
        found: list[TokenLogprob] = []
        if self.asked:
            tops = [self.picks[index][1].rules.logprobs or 0 for index in self.asked]
            found = token_logprobs([picked[i] for i in self.asked], islice(tensors, LOGPROB_TENSORS), tops)
        token_ids, logprobs, errors = self._accept(picked, dict(zip(self.asked, found, strict=True)))
        prompt_logprobs: dict[str, list[TokenLogprob]] = {}
        for chunk in self.chunks:
            tops = [chunk.top] * len(chunk.token_ids)
            found = token_logprobs(chunk.token_ids, islice(tensors, LOGPROB_TENSORS), tops)
            prompt_logprobs[chunk.request_id] = prompt_logprobs.get(chunk.request_id, []) + found
        return StepOutput(token_ids, logprobs, prompt_logprobs, errors)

    def _accept(
        self, picked: list[int], found: dict[int, TokenLogprob]
    ) -> tuple[dict[str, list[int]], dict[str, list[TokenLogprob]], dict[str, str]]:
        """By request id: accepted tokens, their log probabilities, errors. `found` has them by index in `picked`."""
        token_ids, logprobs, errors = {}, {}, dict(self.errors)
        first = 0
        while first < len(picked):
            row, owner = self.picks[first]
            width = 1 + len(row.draft_ids)
            tokens = token_ids[row.request_id] = accepted(row.draft_ids, picked[first : first + width])
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
