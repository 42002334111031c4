"""A launched step on its way back to the host."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from quire.engine.batch import Admission, Row, StepOutput
from quire.engine.types import TokenLogprob
from quire.engine.worker.grammar import SlotGrammars
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
    """What a launched step will say. `picks` are the rows that a token is picked for, each with who owned its slot at
    the time. `download` holds the picked tokens; if some of these are `asked` for log probabilities, what
    logprob_tensors found for them; then that for each of `chunks`."""

    picks: list[tuple[Row, Admission]]
    asked: list[int]
    chunks: list[PromptChunk]
    download: Download
    grammars: SlotGrammars

    def result(self) -> StepOutput:
        """Wait for the device, and tell the grammars what was picked. Once."""
        tensors = iter(self.download.wait())
        token_ids = next(tensors).tolist()
        logprobs: dict[str, TokenLogprob] = {}
        if self.asked:
            tops = [self.picks[index][1].params.logprobs or 0 for index in self.asked]
            found = token_logprobs([token_ids[i] for i in self.asked], islice(tensors, LOGPROB_TENSORS), tops)
            logprobs = {self.picks[i][0].request_id: each for i, each in zip(self.asked, found, strict=True)}
        prompt_logprobs: dict[str, list[TokenLogprob]] = {}
        for chunk in self.chunks:
            tops = [chunk.top] * len(chunk.token_ids)
            found = token_logprobs(chunk.token_ids, islice(tensors, LOGPROB_TENSORS), tops)
            prompt_logprobs[chunk.request_id] = prompt_logprobs.get(chunk.request_id, []) + found
        errors = {}
        for (row, owner), token in zip(self.picks, token_ids, strict=True):
            if (error := self.grammars.consume(row.slot, owner, token)) is not None:
                errors[row.request_id] = error
        ids = {row.request_id: token for (row, _), token in zip(self.picks, token_ids, strict=True)}
        return StepOutput(ids, logprobs, prompt_logprobs, errors)
