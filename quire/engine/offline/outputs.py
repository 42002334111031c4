"""What a program gets: vLLM's RequestOutput, and how it is made of the engine's outputs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.engine import clock, types
from quire.engine.core.history import Timeline
from quire.engine.link.output_stream import Versions
from quire.engine.receipts.receipt import Receipt
from quire.engine.text.detokenizer import TextStream
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    """Of the model's unmodified distribution, natural log."""
    rank: int | None = None
    """1 for the most likely token; None where it is not known."""
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One answer, or with RequestOutputKind.DELTA what is new of it."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    """The sum of its tokens' log probabilities; None unless log probabilities were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token: its own, and those of the alternatives that were asked for, by id."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or the id of stop_token_ids that ended it."""
    weights_versions: Versions = field(default_factory=list)
    """Of a whole answer that has ended: each version of the weights, with the number of tokens that it computed."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When what happened to a request, of n > 1 choices to the first. Times ending with _ts are of time.monotonic()."""

    arrival_time: float
    """Seconds of the Unix clock."""
    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float
    num_generation_tokens: int
    num_preemptions: int

    @property
    def first_token_latency(self) -> float:
        """Seconds."""
        return self.first_token_ts - self.queued_ts


@dataclass(slots=True)
class RequestOutput:
    """A prompt with its n answers."""

    request_id: str
    prompt: str | None
    """None where the prompt was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = False
    metrics: RequestMetrics | None = None
    """When it has finished."""
    num_cached_tokens: int = 0
    weights_version: str = ""
    """Of the weights that computed the last token so far."""
    num_missed_tokens: int = 0
    """Prompt tokens that were computed again, though they had been before."""
    miss_reason: types.MissReason | None = None
    """Mostly why: docs/prefixes.md."""
    receipt: Receipt | None = None
    """When it has finished, if it was asked for."""


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One hypothesis."""

    tokens: list[int]
    """The prompt's and those behind it."""
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str
    """Of the prompt and what is behind it, without the token that ended it."""
    finish_reason: FinishReason
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    sequences: list[BeamSearchSequence]
    """The best first."""


def as_dict(logprob: TokenLogprob, tokenizer: Tokenizer, *, listed: bool = False) -> dict[int, Logprob]:
    """By token id, the picked one first. `listed`: the others are logprob_token_ids, not the most likely ones."""
    found = {logprob.token_id: Logprob(logprob.logprob, logprob.rank, tokenizer.token_text(logprob.token_id))}
    for place, (token, value) in enumerate(logprob.top, 1):
        found.setdefault(token, Logprob(value, None if listed else place, tokenizer.token_text(token)))
    return found


class Answer:
    """Builds one CompletionOutput from the engine's outputs."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        params: types.SamplingParams,
        index: int,
        *,
        detokenize: bool,
    ) -> None:
        self.whole = CompletionOutput(index)
        """All of it so far."""
        self._tokenizer = tokenizer
        self._detokenize = detokenize
        self._listed = bool(params.logprob_token_ids)
        self._text = TextStream(
            tokenizer,
            prompt_ids=prompt_ids,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def add(self, output: types.EngineCoreOutput) -> CompletionOutput:
        """Append an output; returns what it adds. With a stop string it has a finish_reason, though the engine may
        still generate."""
        whole = self.whole
        delta = self._text.push_output(output)
        new = CompletionOutput(whole.index, delta.text if self._detokenize else "", output.new_ids[: delta.used])
        new.finish_reason, new.stop_reason = output.finish_reason, output.stop_reason
        if delta.stop_string is not None:
            new.finish_reason, new.stop_reason = "stop", delta.stop_string
        if output.logprobs is not None:
            used = output.logprobs[: delta.used]
            new.logprobs = [as_dict(each, self._tokenizer, listed=self._listed) for each in used]
            whole.logprobs = (whole.logprobs or []) + new.logprobs
            whole.cumulative_logprob = (whole.cumulative_logprob or 0.0) + sum(each.logprob for each in used)
        new.cumulative_logprob = whole.cumulative_logprob
        whole.text += new.text
        whole.token_ids += new.token_ids
        whole.finish_reason, whole.stop_reason = new.finish_reason, new.stop_reason
        return new

    def copied(self) -> CompletionOutput:
        """All of it so far, which later outputs do not change."""
        found = copy.copy(self.whole)
        found.token_ids = list(found.token_ids)
        found.logprobs = None if found.logprobs is None else list(found.logprobs)
        return found


def metrics_of(timeline: Timeline) -> RequestMetrics:
    """Of a request that has ended."""
    ended = timeline.submitted if timeline.ended is None else timeline.ended
    first = ended if timeline.first_token is None else timeline.first_token
    begun = [began for phase, began, _ in timeline.intervals(ended) if phase != "queued"]
    return RequestMetrics(
        arrival_time=clock.time() - clock.monotonic() + timeline.submitted,
        queued_ts=timeline.submitted,
        scheduled_ts=begun[0] if begun else ended,
        first_token_ts=first,
        last_token_ts=max([first, *(step.record.ended for step in timeline.steps[-1:])]),
        num_generation_tokens=timeline.output_tokens,
        num_preemptions=timeline.count("preempted"),
    )
