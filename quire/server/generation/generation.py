"""A call while the engine generates its answer: what sampling and beam search have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from quire.engine import clock
from quire.engine.core.history import Timeline
from quire.engine.receipts.receipt import ChoiceReceipt
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import PrefixReport
from quire.server.generation.choice import Choice, ChoiceDelta
from quire.server.generation.fold import Answer
from quire.server.generation.spec import GenerationSpec
from quire.server.store.progress import End, Progress

if TYPE_CHECKING:
    from quire.server.observe.metrics import Metrics

TIMES = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second")


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of one call, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None
    """None where no reasoning is looked for."""
    metrics: Mapping[str, float | None] | None = None
    """When what came; None where nobody asks."""
    missed: Sequence[PrefixReport] = ()
    """What the prompts could have found cached, as far as it is known."""
    first_at: float | None = None
    """When the first token came, of time.monotonic()."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def misses(self) -> dict[str, object]:
        """How many prompt tokens were computed again that had been computed before, mostly for which reason, and what
        this took in seconds; nothing where there were none."""
        reasons = Counter[str]()
        for report in self.missed:
            reasons.update(dict(report.missed))
        if not reasons:
            return {}
        seconds = round(sum(report.seconds for report in self.missed), 6)
        (reason, _), *_ = reasons.most_common(1)
        return {"missed_tokens": reasons.total(), "miss_reason": reason, "missed_seconds": seconds}

    def as_dict(self) -> dict[str, object]:
        counts: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens} | self.misses,
        }
        if self.reasoning_tokens is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return counts


def times(timeline: Timeline) -> dict[str, float | None]:
    """Of one answer, by vLLM's names: by the clock of the engine, from its first step on; None before there is one."""
    began = next((at for at, phase in timeline.marks if phase != "queued"), None)
    first, last, count = timeline.first_token, timeline.last_token, timeline.output_tokens
    if began is None or first is None:
        return dict.fromkeys(TIMES)
    values = (
        (first - began) * 1e3,
        (last - first) * 1e3,
        (began - timeline.submitted) * 1e3,
        (last - first) * 1e3 / (count - 1) if count > 1 else None,
        count / (last - began) if last > began else None,
    )
    return dict(zip(TIMES, values, strict=True))


class Journal(Protocol):
    """Where tokens are put before they are sent. Tail has it; each choice has a number there, one behind the other."""

    def add(self, number: int, choice: int, place: int, ids: Sequence[int], end: End | None) -> None:
        """`number`: the first choice's. `place`: of the first of these tokens in the choice."""

    def add_step(self, rows: Sequence[int]) -> None:
        """Tokens of a step: of each the number of its choice, its place there, and its id."""


class Sink(Protocol):
    """Takes steps instead of the reader of a stream."""

    def ready(self) -> bool:
        """Whether it can take one at once; if not, the reader gets it."""

    def take(self, step: list[ChoiceDelta]) -> None: ...


class Generation(ABC):
    """Works on one spec. Iterate `deltas` once; `close` ends it at any time."""

    def __init__(self, spec: GenerationSpec, tokenizer: Tokenizer, metrics: Metrics) -> None:
        n = spec.params.n
        self._spec = spec
        self._metrics = metrics
        self._choices = [Choice(i, spec.prompts[i // n], spec, tokenizer) for i in range(spec.num_choices)]
        self.progress = Progress()
        """Of a resumable spec: the tokens that its choices have so far, those that nobody has read yet among them."""
        self.fresh = True
        """Whether the last step is new, and does not tell again what an answer had before."""
        self.computed = True
        """Whether anything of it is computed, and not all of it told again."""
        self._cut_short = False
        """Whether some choice was ended before it was complete."""
        self._began = clock.monotonic()

    @abstractmethod
    def deltas(self) -> AsyncIterator[list[ChoiceDelta]]:
        """What each step added, a choice's deltas in order; never an empty list. Ends when all choices have ended.

        Raises EngineError when the engine failed one of them, Timeout or QueueTimeout when a deadline passed.
        """

    def shorten(self, sink: Sink) -> None:  # noqa: B027 - nothing, where a step is not made at once
        """Spare the reader of `deltas` its wake-ups: from now on the sink takes whatever arrives while the reader
        waits. Call it between two steps."""

    def keep(self, journal: Journal, number: int, had: Sequence[int]) -> None:  # noqa: B027 - nothing to go on with
        """Put what `progress` gets from now on into a journal, and what it has behind `had`: how many tokens of each
        choice are known. `number`: the first choice's in the journal."""

    @abstractmethod
    def close(self) -> None:
        """Abort what still runs; `deltas` ends. Does nothing the second time."""

    def records(self) -> list[ChoiceReceipt]:
        """What of each choice a receipt says; nothing where no spec asked for it to be recorded, or there is no way."""
        return []

    @property
    def complete(self) -> bool:
        """Whether every choice ended by itself; False if some were cut off."""
        return not self._cut_short and all(choice.finished for choice in self._choices)

    @property
    @abstractmethod
    def weights_version(self) -> str:
        """Of the weights that computed the last token so far."""

    @property
    def usage(self) -> Usage:
        """The usage so far."""
        first_of_prompts = self._choices[:: self._spec.params.n]
        return Usage(
            prompt_tokens=self._spec.prompt_tokens,
            completion_tokens=sum(choice.completion_tokens for choice in self._choices),
            cached_tokens=sum(choice.cached_tokens for choice in first_of_prompts),
            reasoning_tokens=self.reasoning_tokens,
            metrics=None if not self._spec.timed or self.timeline is None else times(self.timeline),
            missed=[choice.prefix for choice in first_of_prompts if choice.prefix is not None],
            first_at=min((each.first_at for each in self._choices if each.first_at is not None), default=None),
        )

    @property
    def timeline(self) -> Timeline | None:
        """What happened to the only choice; None where there are several, or it is not told."""
        return None

    @property
    def reasoning_tokens(self) -> int | None:
        if self._spec.message is None or self._spec.message.reasoning is None:
            return None
        return sum(choice.reasoning_tokens for choice in self._choices)

    def best(self, answers: Sequence[Answer]) -> list[Answer]:
        """The answers to keep, for each prompt those of the highest mean log probability per token, indexed anew."""
        n, keep = self._spec.params.n, self._spec.keep
        if keep == n:
            return list(answers)
        mean = [choice.logprob_sum / max(1, choice.completion_tokens) for choice in self._choices]
        kept: list[Answer] = []
        for first in range(0, len(answers), n):
            group = sorted(answers[first : first + n], key=lambda answer: -mean[answer.index])
            kept += group[:keep]
        return [replace(answer, index=index) for index, answer in enumerate(kept)]

    def _end(self, choice: Choice, reason: str) -> None:
        """Count a choice that has ended, and its prompt when all its choices have."""
        params = self._spec.params
        choice.finished, choice.ended_by = True, reason
        self._metrics.choice_ended(
            reason,
            seconds=clock.monotonic() - self._began,
            decode_seconds=0.0 if choice.first_at is None else choice.last_at - choice.first_at,
            prompt_tokens=len(choice.prompt.ids),
            generation_tokens=choice.completion_tokens,
            max_tokens=params.max_tokens,
        )
        first = choice.index - choice.index % params.n
        of_prompt = self._choices[first : first + params.n]
        if all(each.finished for each in of_prompt):
            self._metrics.prompt_ended(params.n, longest=max(each.completion_tokens for each in of_prompt))

    def _cut_off(self, reason: str) -> None:
        """End all choices that have not ended yet."""
        for choice in self._choices:
            if not choice.finished:
                self._cut_short = True
                self._end(choice, reason)
