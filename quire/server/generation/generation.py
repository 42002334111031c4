from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from quire.engine.client.request_history import Timeline
from quire.engine.common import clock
from quire.engine.common.types import PrefixMissReport
from quire.engine.receipts.receipt import ChoiceReceipt
from quire.engine.receipts.receipt_recorder import ReceiptRecorder
from quire.engine.text.tokenizer import Tokenizer
from quire.server.generation.choice_state import ChoiceDelta, ChoiceState
from quire.server.generation.output_parts import CollectedChoice
from quire.server.generation.resolved_request import GenerationRequest
from quire.server.generation.vector_generation import VectorGeneration

if TYPE_CHECKING:
    from quire.server.observe.metrics import Metrics

TIMING_METRICS = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second")


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None
    """None if reasoning is not parsed."""
    metrics: Mapping[str, float | None] | None = None
    """See `timing_metrics`; None unless requested."""
    prefix_reports: Sequence[PrefixMissReport] = ()
    first_token_time: float | None = None
    """`time.monotonic()`."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def cache_miss_fields(self) -> dict[str, object]:
        reasons = Counter[str]()
        for report in self.prefix_reports:
            reasons.update(dict(report.tokens_by_reason))
        if not reasons:
            return {}
        seconds = round(sum(report.compute_seconds for report in self.prefix_reports), 6)
        (reason, _), *_ = reasons.most_common(1)
        return {"missed_tokens": reasons.total(), "miss_reason": reason, "missed_seconds": seconds}

    def to_openai_usage(self) -> dict[str, object]:
        counts: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens} | self.cache_miss_fields,
        }
        if self.reasoning_tokens is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return counts


def timing_metrics(timeline: Timeline) -> dict[str, float | None]:
    """Uses vLLM's names. The engine's first step for the request ends the queue time. All values are None before the
    first token.
    """
    began = next((at for at, phase in timeline.marks if phase != "queued"), None)
    first = timeline.first_token_at
    last = timeline.last_token_at
    count = timeline.output_tokens
    if began is None or first is None:
        return dict.fromkeys(TIMING_METRICS)
    values = (
        (first - began) * 1e3,
        (last - first) * 1e3,
        (began - timeline.submitted_at) * 1e3,
        (last - first) * 1e3 / (count - 1) if count > 1 else None,
        count / (last - began) if last > began else None,
    )
    return dict(zip(TIMING_METRICS, values, strict=True))


class DeltaSink(Protocol):
    def can_take_step(self) -> bool:
        """Returns False if the reader of the stream must take the step instead."""

    def take_step(self, step: list[ChoiceDelta]) -> None: ...


class Generation(ABC):
    """Iterate `deltas` once; call `close` at any time."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer, metrics: Metrics) -> None:
        n = request.params.n
        self.request = request
        self._metrics = metrics
        self._choices = [
            ChoiceState(i, request.prompts[i // n], request, tokenizer) for i in range(request.num_choices)
        ]
        self._has_cut_choices = False
        self._start_time = clock.monotonic()

    @abstractmethod
    def deltas(self) -> AsyncIterator[list[ChoiceDelta]]:
        """Yield each step's deltas, never an empty list, until all choices have ended.

        Raises EngineError, Timeout or QueueTimeout.
        """

    def attach_sink(self, sink: DeltaSink) -> None:  # noqa: B027 - nothing, where a step is not made at once
        """Lets `sink` take steps that arrive while the reader waits, which saves wake-ups. Call it between
        two steps.
        """

    @abstractmethod
    def close(self) -> None:
        """Abort all unfinished requests, and end `deltas`. Idempotent."""

    @property
    def choice_ends(self) -> list[tuple[int, str]]:
        """(token count, end reason) of each choice; "" if it has not ended."""
        return [(choice.completion_tokens, choice.end_reason) for choice in self._choices]

    @property
    def is_complete(self) -> bool:
        return not self._has_cut_choices and all(choice.is_finished for choice in self._choices)

    @property
    @abstractmethod
    def weights_version(self) -> str:
        """Weights that computed the latest token."""

    @property
    def usage(self) -> Usage:
        first_of_prompts = self._choices[:: self.request.params.n]
        return Usage(
            prompt_tokens=self.request.prompt_tokens,
            completion_tokens=sum(choice.completion_tokens for choice in self._choices),
            cached_tokens=sum(choice.cached_tokens for choice in first_of_prompts),
            reasoning_tokens=self.reasoning_tokens,
            metrics=None
            if not self.request.include_metrics or self.timeline is None
            else timing_metrics(self.timeline),
            prefix_reports=[choice.prefix_report for choice in first_of_prompts if choice.prefix_report is not None],
            first_token_time=min(
                (each.first_token_time for each in self._choices if each.first_token_time is not None), default=None
            ),
        )

    @property
    def timeline(self) -> Timeline | None:
        """None with several choices, or if the request does not ask for timings."""
        return None

    @property
    def reasoning_tokens(self) -> int | None:
        if self.request.message_format is None or self.request.message_format.reasoning_format is None:
            return None
        return sum(choice.reasoning_tokens for choice in self._choices)

    def select_best(self, answers: Sequence[CollectedChoice]) -> list[CollectedChoice]:
        """Returns the answers with the highest mean log probability per token, with new indices."""
        n, keep = self.request.params.n, self.request.num_returned
        if keep == n:
            return list(answers)
        mean = [choice.logprob_sum / max(1, choice.completion_tokens) for choice in self._choices]
        best_answers: list[CollectedChoice] = []
        for first in range(0, len(answers), n):
            group = sorted(answers[first : first + n], key=lambda answer: -mean[answer.index])
            best_answers += group[:keep]
        return [replace(answer, index=index) for index, answer in enumerate(best_answers)]

    def _record_choice_end(self, choice: ChoiceState, reason: str) -> None:
        params = self.request.params
        choice.is_finished, choice.end_reason = True, reason
        self._metrics.observe_finished_choice(
            reason,
            seconds=clock.monotonic() - self._start_time,
            decode_seconds=0.0 if choice.first_token_time is None else choice.last_token_time - choice.first_token_time,
            prompt_tokens=len(choice.prompt.ids),
            generation_tokens=choice.completion_tokens,
            max_tokens=params.max_tokens,
        )
        first = choice.index - choice.index % params.n
        of_prompt = self._choices[first : first + params.n]
        if all(each.is_finished for each in of_prompt):
            self._metrics.observe_all_choices_finished(
                params.n, max_generation_tokens=max(each.completion_tokens for each in of_prompt)
            )

    def _record_open_choices_as_cut(self, reason: str) -> None:
        for choice in self._choices:
            if not choice.is_finished:
                self._has_cut_choices = True
                self._record_choice_end(choice, reason)


GenerationType = TypeVar("GenerationType", Generation, VectorGeneration)


class RunningGeneration(Generic[GenerationType]):
    def __init__(self, generation: GenerationType, receipt_recorder: ReceiptRecorder | None = None) -> None:
        """`receipt_recorder`: None without a receipt, and for beam search."""
        self.generation: GenerationType = generation
        self._receipt_recorder = receipt_recorder
        self._end_callbacks: list[Callable[[], None]] = []

    @property
    def needs_engine(self) -> bool:
        return self._receipt_recorder is None or self._receipt_recorder.needs_engine

    def choice_receipts(self) -> list[ChoiceReceipt]:
        if self._receipt_recorder is None or isinstance(self.generation, VectorGeneration):
            return []
        return self._receipt_recorder.choice_receipts(self.generation.choice_ends)

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Callbacks run once, in the order of these calls."""
        self._end_callbacks.append(callback)

    def close(self) -> None:
        self.generation.close()
        callbacks, self._end_callbacks = self._end_callbacks, []
        for callback in callbacks:
            callback()
