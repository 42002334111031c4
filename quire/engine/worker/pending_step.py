from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from quire.engine.checkpoint.pooling import PoolingConfig
from quire.engine.common.scheduler_output import ModelRunnerOutput, RequestFailure, ScheduledRequest, SchedulerOutput
from quire.engine.common.types import TokenLogprob
from quire.engine.layers.pooling import PoolingChunk, postprocess_vectors_by_request_id
from quire.engine.models.decoder import MediaEmbeddings
from quire.engine.worker.graphs.mixed_batch_graphs import GraphPlan
from quire.engine.worker.input_batch import ForwardInputs, SampleTargets, SlotRequest
from quire.engine.worker.sampling.sampler import include_sampled_token, token_logprobs
from quire.engine.worker.sampling.sampling_rules import NO_TOKEN_LEFT
from quire.engine.worker.sampling.slot_grammars import SlotGrammars
from quire.kernels.gpu.host_transfer import HostDownload


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """`inputs` is None if a graph computes them, or if the batch only encodes images."""

    scheduler_output: SchedulerOutput
    sample_targets: SampleTargets
    inputs: ForwardInputs | None
    features: MediaEmbeddings | None = None
    graph_plan: GraphPlan | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobTargets:
    request_id: str
    token_ids: list[int]
    num_top: int


NONFINITE_TOKEN = -1
"""Replaces a token sampled from infinite or NaN logits."""
_NONFINITE_CAUSE = "its weights, or an adapter's, are broken, or too large for its type"
_FAILURES_BY_TOKEN = {
    NONFINITE_TOKEN: RequestFailure(f"the model computed no finite logit for the next token: {_NONFINITE_CAUSE}"),
    NO_TOKEN_LEFT: RequestFailure(
        "the request's constraints leave no token to continue with (allowed_token_ids, bad_words, min_tokens)",
        "constraints",
    ),
}
"""Keyed by the value that replaces the sampled token."""
NUM_LOGPROB_TENSORS = 4


@dataclass(frozen=True, slots=True)
class PendingStep:
    """`sampled_rows`: rows, and the requests in their slots at launch. `download`, in this order: the sampled tokens;
    logprob_tensors for `logprob_indices`; logprob_tensors for each of `prompt_chunks`; the vectors of those
    `pooled_rows` that are finished.
    """

    sampled_rows: list[tuple[ScheduledRequest, SlotRequest]]
    logprob_indices: list[int]
    prompt_chunks: list[PromptLogprobTargets]
    pooled_rows: list[PoolingChunk]
    pooling: PoolingConfig | None
    download: HostDownload
    grammars: SlotGrammars
    used_cuda_graph: bool = False

    def sample_tokens(self) -> None:
        """Does nothing, because the tokens are sampled already."""

    def result(self) -> ModelRunnerOutput:
        """Waits for the device and advances grammars. Call once."""
        tensors = iter(self.download.wait_for_copy())
        sampled = next(tensors).tolist()
        token_logprob_list: list[TokenLogprob] = []
        if self.logprob_indices:
            rules = [self.sampled_rows[index][1].rules for index in self.logprob_indices]
            tops = [each.num_logprobs or 0 for each in rules]
            token_logprob_list = token_logprobs(
                [sampled[i] for i in self.logprob_indices], islice(tensors, NUM_LOGPROB_TENSORS), tops
            )
            token_logprob_list = [
                one if each.logprob_token_ids is None else include_sampled_token(one)
                for one, each in zip(token_logprob_list, rules, strict=True)
            ]
        token_ids, logprobs, errors = self._accept_drafts_and_advance_grammars(
            sampled, dict(zip(self.logprob_indices, token_logprob_list, strict=True))
        )
        prompt_logprobs: dict[str, list[TokenLogprob]] = {}
        for chunk in self.prompt_chunks:
            tops = [chunk.num_top] * len(chunk.token_ids)
            token_logprob_list = token_logprobs(chunk.token_ids, islice(tensors, NUM_LOGPROB_TENSORS), tops)
            prompt_logprobs[chunk.request_id] = prompt_logprobs.get(chunk.request_id, []) + token_logprob_list
        vectors = {}
        if self.pooling is not None and self.pooled_rows:
            vectors = postprocess_vectors_by_request_id(self.pooled_rows, next(tensors), self.pooling)
        return ModelRunnerOutput(token_ids, logprobs, prompt_logprobs, errors, vectors, self.used_cuda_graph)

    def _accept_drafts_and_advance_grammars(
        self, sampled: list[int], logprobs_by_index: dict[int, TokenLogprob]
    ) -> tuple[dict[str, list[int]], dict[str, list[TokenLogprob]], dict[str, RequestFailure]]:
        token_ids = {}
        logprobs = {}
        errors = dict[str, RequestFailure]()
        first = 0
        while first < len(sampled):
            row, slot_request = self.sampled_rows[first]
            width = 1 + len(row.draft_token_ids)
            tokens = token_ids[row.request_id] = accept_drafts(row.draft_token_ids, sampled[first : first + width])
            if tokens[-1] in _FAILURES_BY_TOKEN:
                token_ids[row.request_id], errors[row.request_id] = tokens[:-1], _FAILURES_BY_TOKEN[tokens[-1]]
                first += width
                continue
            if first in logprobs_by_index:
                logprobs[row.request_id] = [logprobs_by_index[first + index] for index in range(len(tokens))]
            if (
                self.grammars.requests
                and (error := self.grammars.advance_and_get_failure(row.slot, slot_request.new_request, tokens))
                is not None
            ):
                errors[row.request_id] = error
            first += width
        return token_ids, logprobs, errors


@dataclass(slots=True)
class UnsampledStep:
    """A step whose forward pass is launched, and whose sampling waits for a token that a grammar must follow first."""

    launch_sampling: Callable[[], PendingStep] | None
    """None once it was called, so that its logits and hidden states are freed."""
    _sampled_step: PendingStep | None = None

    def sample_tokens(self) -> None:
        if self.launch_sampling is not None:
            launch_sampling, self.launch_sampling = self.launch_sampling, None
            self._sampled_step = launch_sampling()

    def result(self) -> ModelRunnerOutput:
        assert self._sampled_step is not None, "sample_tokens was not called"
        return self._sampled_step.result()


def accept_drafts(drafts: list[int], sampled: list[int]) -> list[int]:
    """Tokens after the first one that differs from its draft are dropped, because they follow a wrong draft."""
    num_accepted = 0
    while num_accepted < len(drafts) and sampled[num_accepted] == drafts[num_accepted]:
        num_accepted += 1
    return sampled[: num_accepted + 1]
