"""Beam search over the engine client: each step asks for one more token of every beam, with its alternatives.

The rule is vLLM's: the 2 * width most likely tokens of every beam are candidates; those that end a sequence complete
it, the width best of the others go on. A hypothesis scores its summed log probability over length ** length_penalty
(Wu et al., 2016); the length is what was generated, as in transformers. Beams share all but their last tokens with the
prefix cache, so a step costs about one token per beam.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from quire.engine.client.client import OutputStream
from quire.engine.errors import EngineError, InvalidRequest, Timeout
from quire.engine.types import FinishReason, RequestOutput, SamplingParams, TokenLogprob
from quire.server.generation.choice import Choice, ChoiceDelta, Job
from quire.server.generation.generate import Answer, Usage
from quire.server.generation.prompts import Prompt
from quire.server.served_model import Serving


@dataclass(frozen=True, slots=True)
class Beam:
    """A hypothesis: its tokens behind the prompt."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    total: float = 0.0
    """Sum of the log probabilities."""
    ended: bool = False

    def then(self, logprob: TokenLogprob, ended: bool) -> Beam:
        total = self.total + logprob.logprob
        return Beam((*self.ids, logprob.token_id), (*self.logprobs, logprob), total, ended)


@dataclass(frozen=True, slots=True)
class Scores:
    length_penalty: float
    longest: int

    def of(self, beam: Beam) -> float:
        return beam.total / max(1, len(beam.ids)) ** self.length_penalty

    def bound(self, beam: Beam) -> float:
        """What no continuation of the beam can exceed: log probabilities only add up downwards."""
        return max(beam.total / length**self.length_penalty for length in (len(beam.ids) + 1, self.longest))


class BeamSearch:
    """A job answered by beam search, n beams wide; what Generation is for sampling. Whole answers only."""

    def __init__(self, job: Job, serving: Serving) -> None:
        """Raises InvalidRequest for answers that must follow a grammar."""
        if job.params.grammar is not None:
            raise InvalidRequest(
                "use_beam_search is not available together with structured outputs", param="use_beam_search"
            )
        self._job = job
        self._client = serving.client
        self._metrics = serving.metrics
        self._room = serving.info.max_model_len
        ends = () if job.params.ignore_eos else serving.tokenizer.eos_token_ids
        self._ends = frozenset((*job.params.stop_token_ids, *ends))
        n = job.params.n
        ended = [list[int]() for _ in job.prompts]
        self._choices = [
            Choice(i, job.prompts[i // n], job, serving.tokenizer, ended[i // n]) for i in range(job.num_choices)
        ]
        self._cached = [0] * len(job.prompts)
        self._cancelled: set[int] = set()
        """Prompts whose search somebody ended."""
        self._streams: set[OutputStream] = set()
        self._closed = False

    @property
    def complete(self) -> bool:
        return all(choice.finished for choice in self._choices)

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=sum(len(prompt.ids) for prompt in self._job.prompts),
            completion_tokens=sum(choice.completion_tokens for choice in self._choices),
            cached_tokens=sum(self._cached),
        )

    def best(self, answers: Sequence[Answer]) -> list[Answer]:
        return list(answers)

    async def deltas(self) -> AsyncIterator[list[ChoiceDelta]]:
        """One step: all of every answer. None when closed before. Raises EngineError and Timeout."""
        job, n, limit = self._job, self._job.params.n, self._job.body.timeout
        try:
            async with asyncio.timeout(limit):
                found = await asyncio.gather(*(self._search(index) for index in range(len(job.prompts))))
        except TimeoutError:
            self._finish("timeout")
            raise Timeout(f"the answer was not complete within timeout ({limit} s)", param="timeout") from None
        except EngineError:
            self._finish("error")
            raise
        finally:
            self._stop()
        if not self._closed:
            yield [self._answer(choice, found[choice.index // n][choice.index % n]) for choice in self._choices]

    def close(self) -> None:
        """Abort what still runs; `deltas` ends."""
        self._stop()
        self._finish("abort")

    def _stop(self) -> None:
        for stream in list(self._streams):
            stream.close()

    async def _search(self, index: int) -> list[Beam]:
        """The n best hypotheses for one prompt, best first; those there are so far when somebody cancels it."""
        job, params, width = self._job, self._job.params, self._job.params.n
        prompt = job.prompts[index]
        longest = self._room - len(prompt.ids)
        longest = longest if params.max_tokens is None else min(longest, params.max_tokens)
        scores = Scores(job.body.length_penalty, longest)
        running, completed = [Beam()], list[Beam]()
        for step in range(longest):
            outputs = await self._step(index, step, prompt, running)
            if self._closed or index in self._cancelled:
                break
            candidates = [
                beam.then(logprob, logprob.token_id in self._ends)
                for beam, output in zip(running, outputs, strict=True)
                for logprob in alternatives(output, 2 * width, params.logprobs or 0)
            ]
            completed += [beam for beam in candidates if beam.ended]
            completed = sorted(completed, key=scores.of, reverse=True)[:width]
            # All of this step's candidates are equally long: the penalty does not change their order.
            going_on = [beam for beam in candidates if not beam.ended]
            running = sorted(going_on, key=lambda beam: beam.total, reverse=True)[:width]
            worst = scores.of(completed[-1]) if len(completed) == width else -math.inf
            if all(scores.bound(beam) <= worst for beam in running):
                running = []
                break
        found = sorted(completed + running, key=scores.of, reverse=True)
        return [*found, *[Beam()] * width][:width]

    async def _step(self, index: int, step: int, prompt: Prompt, beams: Sequence[Beam]) -> list[RequestOutput]:
        """One more token of every beam. Fewer outputs than beams when closed or cancelled under way."""
        job = self._job
        top = max(2 * job.params.n, job.params.logprobs or 0)
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=top, ignore_eos=True)
        requests = [
            job.request(f"{job.id}-{index}-{step}-{i}", [*prompt.ids, *beam.ids], params, seed=0)
            for i, beam in enumerate(beams)
        ]
        outputs: dict[str, RequestOutput] = {}
        stream = self._client.submit(requests, job.id)
        self._streams.add(stream)
        try:
            async for some in stream:
                for output in some:
                    if output.finish_reason == "error":
                        raise EngineError(output.error or "the engine failed this request")
                    if output.finish_reason == "abort":
                        self._cancelled.add(index)
                    outputs[output.id] = output
        finally:
            stream.close()
            self._streams.discard(stream)
        self._metrics.recent.now()
        if step == 0:
            self._cached[index] = max((output.cached_tokens for output in outputs.values()), default=0)
        return [outputs[request.id] for request in requests if request.id in outputs]

    def _answer(self, choice: Choice, beam: Beam) -> ChoiceDelta:
        unfinished: FinishReason = "abort" if choice.index // self._job.params.n in self._cancelled else "length"
        reason = "stop" if beam.ended else unfinished
        last = beam.ids[-1] if beam.ids else None
        output = RequestOutput(
            id="",
            new_ids=list(beam.ids),
            logprobs=None if self._job.params.logprobs is None else list(beam.logprobs),
            finish_reason=reason,
            stop_reason=last if beam.ended and last in self._job.params.stop_token_ids else None,
        )
        delta = choice.push(output)
        assert delta is not None, "a terminal output has a delta"
        choice.end(delta.finish_reason or reason, self._metrics)
        return delta

    def _finish(self, reason: str) -> None:
        """End what has not ended yet."""
        for choice in self._choices:
            if not choice.finished:
                self._closed = True
                choice.end(reason, self._metrics)


def alternatives(output: RequestOutput, count: int, shown: int) -> list[TokenLogprob]:
    """The most likely next tokens, each as if it had been picked, with the `shown` most likely beside it."""
    assert output.logprobs is not None, "beams ask for them"
    top = output.logprobs[0].top
    return [TokenLogprob(token, value, rank, top[:shown]) for rank, (token, value) in enumerate(top[:count], 1)]
