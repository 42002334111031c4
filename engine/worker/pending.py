"""A launched step on its way back to the host."""

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
    """Prompt tokens of one row, whose log probabilities are wanted."""

    request_id: str
    token_ids: list[int]
    top: int


LOGPROB_TENSORS = 4
"""What `logprob_tensors` makes of one set of logits."""


@dataclass(frozen=True, slots=True)
class PendingStep:
    """What a launched step will say. `picks` names for each picked token its row, and who owned the row's slot at the
    time. `download` holds the picked tokens; if some of these are `asked` for log probabilities, what logprob_tensors
    found for them; then that for each of `chunks`."""

    picks: list[tuple[Row, Owner]]
    asked: list[int]
    chunks: list[PromptChunk]
    download: Download
    grammars: SlotGrammars
    errors: dict[str, str]
    """Of requests that this worker cannot serve, by their ids."""

    def result(self) -> StepOutput:
        """Wait for the device, and tell the grammars what was picked. Once."""
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
        """By request: the accepted tokens, their log probabilities where `found` has them, and all errors."""
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
    """The picks, one more than drafts, up to the first that differs from its draft: what follows was picked after a
    token that does not come."""
    count = 0
    while count < len(drafts) and picks[count] == drafts[count]:
        count += 1
    return picks[: count + 1]
