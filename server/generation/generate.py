"""One call's way through the engine: prompts and parameters in, text deltas out, step by step.

Streamed and whole answers share it: a whole answer is `fold` of the deltas.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from quire.engine.client.client import OutputStream
from quire.engine.errors import EngineError, QueueTimeout, Timeout
from quire.engine.types import RequestOutput, TokenLogprob
from quire.server.generation.choice import Choice, ChoiceDelta, Job, TokenText
from quire.server.generation.tools.sink import CallDelta
from quire.server.served_model import Serving


@dataclass(slots=True)
class Answer:
    """A whole choice: the fold of its deltas."""

    index: int
    pieces: list[str] = field(default_factory=list)
    tokens: list[TokenText] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] = field(default_factory=list)
    prompt_ids: Sequence[int] | None = None
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    reasoning_pieces: list[str] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasoning_pieces)


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of one call, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None
    """None where no reasoning is looked for."""

    def as_dict(self) -> dict[str, object]:
        counts: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return counts


class Deadlines:
    """Of one job, in seconds from its submission; None: none. One that passes ends the stream of outputs with an error.
    Call `cancel` when the job is over."""

    def __init__(self, stream: OutputStream, *, timeout: float | None, queue_timeout: float | None) -> None:
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.passed: str | None = None
        """The parameter whose deadline ended the stream."""
        if timeout is not None:
            late = Timeout(f"the answer was not complete within timeout ({timeout:g} s)", param="timeout")
            self._set("timeout", timeout, late)
        if queue_timeout is not None:
            text = f"no token came within queue_timeout ({queue_timeout:g} s)"
            self._set("queue_timeout", queue_timeout, QueueTimeout(text, param="queue_timeout"))

    def _set(self, name: str, seconds: float, error: Timeout | QueueTimeout) -> None:
        self._timers[name] = self._loop.call_later(seconds, self._pass, name, error)

    def _pass(self, name: str, error: Timeout | QueueTimeout) -> None:
        if self._stream.give_up(error):
            self.passed = name

    def started(self) -> None:
        """The first token has come."""
        if "queue_timeout" in self._timers:
            self._timers.pop("queue_timeout").cancel()

    def cancel(self) -> None:
        for timer in self._timers.values():
            timer.cancel()


class Generation:
    """A job that the engine works on. Iterate `deltas`; `close` ends it at any time."""

    def __init__(self, job: Job, serving: Serving) -> None:
        """Submits the job. Raises EngineError when the engine is gone."""
        self._job = job
        self._metrics = serving.metrics
        n = job.params.n
        single = msgspec.structs.replace(job.params, n=1)
        self._choices: dict[str, Choice] = {}
        requests, ended = [], [list[int]() for _ in job.prompts]
        for index in range(job.num_choices):
            prompt = job.prompts[index // n]
            request_id = f"{job.id}-{index}"
            self._choices[request_id] = Choice(index, prompt, job, serving.tokenizer, ended[index // n])
            requests.append(job.request(request_id, prompt.ids, single, job.params.choice_seed(index % n)))
        self._cut_short = False
        self._started = time.monotonic()
        self._stream = serving.client.submit(requests, job.id)
        self._deadlines = Deadlines(self._stream, timeout=job.body.timeout, queue_timeout=job.body.queue_timeout)

    @property
    def complete(self) -> bool:
        """Whether every choice came to its own end; false once closed before."""
        return not self._cut_short and all(choice.finished for choice in self._choices.values())

    @property
    def usage(self) -> Usage:
        """So far. A prompt counts once, however many choices continue it."""
        n = self._job.params.n
        firsts = [choice for choice in self._choices.values() if choice.index % n == 0]
        return Usage(
            prompt_tokens=sum(len(prompt.ids) for prompt in self._job.prompts),
            completion_tokens=sum(choice.completion_tokens for choice in self._choices.values()),
            cached_tokens=sum(choice.cached_tokens for choice in firsts),
            reasoning_tokens=self._reasoning_tokens,
        )

    @property
    def _reasoning_tokens(self) -> int | None:
        if self._job.message is None or self._job.message.reasoning is None:
            return None
        return sum(choice.reasoning_tokens for choice in self._choices.values())

    async def deltas(self) -> AsyncIterator[list[ChoiceDelta]]:
        """What each step added, at most one delta per choice; never an empty list. Ends when all choices have.

        Raises EngineError when the engine failed one of them, Timeout or QueueTimeout when it was late.
        """
        try:
            async for outputs in self._stream:
                now = time.monotonic()
                step = [delta for output in outputs if (delta := self._push(output, now)) is not None]
                if step:
                    yield step
        except EngineError:
            self._finish("error")
            raise
        finally:
            self.close()

    def _push(self, output: RequestOutput, now: float) -> ChoiceDelta | None:
        choice = self._choices[output.id]
        if choice.finished:  # closed while this output waited to be read
            return None
        if output.finish_reason == "error":
            choice.end("error", self._metrics)
            raise EngineError(output.error or "the engine failed this request")
        delta = choice.push(output)
        if output.new_ids:
            if choice.first_at is None:
                choice.first_at = now
                self._deadlines.started()
                self._metrics.first_token(now - self._started)
            else:
                self._metrics.next_token(now - choice.last_at)
            choice.last_at = now
        if delta is not None and delta.finish_reason is not None:
            self._stream.abort(output.id, delta.finish_reason)  # does nothing when it was the engine that finished
            choice.end(delta.finish_reason, self._metrics)
        return delta

    def best(self, answers: Sequence[Answer]) -> list[Answer]:
        """The answers that the job keeps, for each prompt by mean log probability per token, indexed anew."""
        n = self._job.params.n
        keep = self._job.keep or n
        if keep == n:
            return list(answers)
        mean = {each.index: each.logprob_sum / max(1, each.completion_tokens) for each in self._choices.values()}
        kept: list[Answer] = []
        for first in range(0, len(answers), n):
            group = sorted(answers[first : first + n], key=lambda answer: -mean[answer.index])
            kept += group[:keep]
        return [replace(answer, index=index) for index, answer in enumerate(kept)]

    def close(self) -> None:
        """Abort what still runs; `deltas` ends. Does nothing the second time."""
        self._deadlines.cancel()
        self._stream.close()
        self._finish(self._deadlines.passed or "abort")

    def _finish(self, reason: str) -> None:
        """End what has not ended yet."""
        for choice in self._choices.values():
            if not choice.finished:
                self._cut_short = True
                choice.end(reason, self._metrics)


async def fold(steps: AsyncIterator[list[ChoiceDelta]]) -> list[Answer]:
    """The whole answers, by index."""
    answers: dict[int, Answer] = {}
    async for step in steps:
        for delta in step:
            answer = answers.setdefault(delta.index, Answer(delta.index))
            answer.pieces.append(delta.text)
            answer.tokens += delta.tokens
            answer.reasoning_pieces.append(delta.reasoning)
            answer.calls += delta.calls
            answer.finish_reason = delta.finish_reason
            answer.stop_reason = delta.stop_reason
            answer.token_ids += delta.token_ids
            answer.prompt_ids = answer.prompt_ids if delta.prompt_ids is None else delta.prompt_ids
            answer.prompt_logprobs = delta.prompt_logprobs or answer.prompt_logprobs
    return [answers[index] for index in sorted(answers)]
