"""A launched step on its way back to the host."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.types import Admission, Row, StepOutput, TokenLogprob
from engine.worker.grammar import SlotGrammars
from engine.worker.sampler import token_logprobs
from engine.worker.transfer import Download


@dataclass(frozen=True, slots=True)
class Pick:
    """A row that a token is picked for, and who owned its slot at the time."""

    row: Row
    owner: Admission


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
    """What a launched step will say. `download` holds the picked tokens; if some of these are `asked` for log
    probabilities, what logprob_tensors found for them; then that for each of `chunks`."""

    picks: list[Pick]
    asked: list[int]
    chunks: list[PromptChunk]
    download: Download
    grammars: SlotGrammars

    def result(self) -> StepOutput:
        """Wait for the device, and tell the grammars what was picked. Once."""
        picked, *tensors = self.download.wait()
        token_ids = picked.tolist()
        logprobs: dict[str, TokenLogprob] = {}
        if self.asked:
            tops = [self.picks[index].owner.params.logprobs or 0 for index in self.asked]
            found = token_logprobs([token_ids[index] for index in self.asked], _four(tensors), tops)
            logprobs = {self.picks[i].row.request_id: each for i, each in zip(self.asked, found, strict=True)}
        prompt_logprobs: dict[str, list[TokenLogprob]] = {}
        for chunk in self.chunks:
            found = token_logprobs(chunk.token_ids, _four(tensors), [chunk.top] * len(chunk.token_ids))
            prompt_logprobs[chunk.request_id] = prompt_logprobs.get(chunk.request_id, []) + found
        errors = {}
        for pick, token in zip(self.picks, token_ids, strict=True):
            if (error := self.grammars.consume(pick.row.slot, pick.owner, token)) is not None:
                errors[pick.row.request_id] = error
        ids = {pick.row.request_id: token for pick, token in zip(self.picks, token_ids, strict=True)}
        return StepOutput(ids, logprobs, prompt_logprobs, errors)


def _four(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Take the next ones off the front."""
    taken = tuple(tensors[:LOGPROB_TENSORS])
    del tensors[:LOGPROB_TENSORS]
    return taken
