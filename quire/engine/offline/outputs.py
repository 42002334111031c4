from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.engine.client.output_stream import Versions
from quire.engine.client.request_history import Timeline
from quire.engine.common import clock, request_params, types
from quire.engine.common.types import FinishReason, TokenLogprob
from quire.engine.receipts.receipt import Receipt
from quire.engine.text.detokenizer import IncrementalDetokenizer
from quire.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    """Natural logarithm of the probability in the model's unmodified distribution."""
    rank: int | None = None
    """1 for the most likely token; None if unknown."""
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One answer or, with RequestOutputKind.DELTA, its new part."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    """None unless logprobs were requested."""
    logprobs: list[dict[int, Logprob]] | None = None
    """One dict per token, keyed by token id, with the token and the requested alternatives."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string, or the id in stop_token_ids, that ended the answer."""
    weights_versions: Versions = field(default_factory=list)
    """Set for a finished, whole answer."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Metrics of a request or, for n > 1, of its first choice. Times ending in _ts are of time.monotonic()."""

    arrival_time: float
    """Unix time in seconds."""
    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float
    num_generation_tokens: int
    num_preemptions: int

    @property
    def first_token_latency(self) -> float:
        """Seconds from queuing to the first token."""
        return self.first_token_ts - self.queued_ts


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    """None if the prompt was token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = False
    metrics: RequestMetrics | None = None
    """Set when the request has finished."""
    num_cached_tokens: int = 0
    weights_version: str = ""
    """Version of the weights that computed the last token so far."""
    num_missed_tokens: int = 0
    """Prompt tokens computed again although they had been computed before."""
    miss_reason: types.MissReason | None = None
    """Why tokens were missed; see docs/guides/prefix-caching.md."""
    receipt: Receipt | None = None
    """Set when the request has finished, if requested."""


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    tokens: list[int]
    """Ids of prompt and answer."""
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str
    """Prompt and answer, without the end token."""
    finish_reason: FinishReason
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    sequences: list[BeamSearchSequence]
    """Best first."""


def logprobs_by_token(logprob: TokenLogprob, tokenizer: Tokenizer, *, listed: bool = False) -> dict[int, Logprob]:
    """The sampled token comes first. `listed`: the others are logprob_token_ids, so their ranks are unknown."""
    logprobs = {
        logprob.token_id: Logprob(logprob.logprob, logprob.rank, tokenizer.token_display_text(logprob.token_id))
    }
    for place, (token, value) in enumerate(logprob.top, 1):
        logprobs.setdefault(token, Logprob(value, None if listed else place, tokenizer.token_display_text(token)))
    return logprobs


class CompletionBuilder:
    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        params: request_params.SamplingParams,
        index: int,
        *,
        detokenize: bool,
    ) -> None:
        self.completion = CompletionOutput(index)
        self._tokenizer = tokenizer
        self._detokenize = detokenize
        self._has_listed_logprobs = bool(params.logprob_token_ids)
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            prompt_ids=prompt_ids,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def add_output_and_get_delta(self, output: types.EngineCoreOutput) -> CompletionOutput:
        """A stop string sets a finish_reason, although the engine may go on."""
        completion = self.completion
        delta = self._detokenizer.push_output(output)
        new = CompletionOutput(
            completion.index, delta.text if self._detokenize else "", output.new_ids[: delta.num_used_ids]
        )
        new.finish_reason, new.stop_reason = output.finish_reason, output.stop_reason
        if delta.stop_string is not None:
            new.finish_reason, new.stop_reason = "stop", delta.stop_string
        if output.logprobs is not None:
            used_logprobs = output.logprobs[: delta.num_used_ids]
            new.logprobs = [
                logprobs_by_token(each, self._tokenizer, listed=self._has_listed_logprobs) for each in used_logprobs
            ]
            completion.logprobs = (completion.logprobs or []) + new.logprobs
            completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + sum(
                each.logprob for each in used_logprobs
            )
        new.cumulative_logprob = completion.cumulative_logprob
        completion.text += new.text
        completion.token_ids += new.token_ids
        completion.finish_reason, completion.stop_reason = new.finish_reason, new.stop_reason
        return new

    def copy_completion(self) -> CompletionOutput:
        """Later outputs do not change the copy."""
        completion = copy.copy(self.completion)
        completion.token_ids = list(completion.token_ids)
        completion.logprobs = None if completion.logprobs is None else list(completion.logprobs)
        return completion


def make_request_metrics(timeline: Timeline) -> RequestMetrics:
    ended = timeline.submitted_at if timeline.ended_at is None else timeline.ended_at
    first = ended if timeline.first_token_at is None else timeline.first_token_at
    start_times = [began for phase, began, _ in timeline.phase_intervals(ended) if phase != "queued"]
    return RequestMetrics(
        arrival_time=clock.time() - clock.monotonic() + timeline.submitted_at,
        queued_ts=timeline.submitted_at,
        scheduled_ts=start_times[0] if start_times else ended,
        first_token_ts=first,
        last_token_ts=max([first, *(step.record.applied_at for step in timeline.steps[-1:])]),
        num_generation_tokens=timeline.output_tokens,
        num_preemptions=timeline.count_phase("preempted"),
    )
