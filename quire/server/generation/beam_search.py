"""Beam search over the engine client: each step asks for one more token of every beam, with its alternatives.

engine/text/beams.py has the rule. Beams share all but their last tokens with the prefix cache, so a step costs about
one token per beam.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from quire.engine.errors import EngineError, Timeout
from quire.engine.link.client import EngineClient
from quire.engine.link.output_stream import OutputStream
from quire.engine.text.beams import Beam, Search
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import EngineCoreOutput, FinishReason, SamplingParams
from quire.server.generation.choice import Choice, ChoiceDelta
from quire.server.generation.generation import Generation
from quire.server.generation.loop_turns import LoopTurns
from quire.server.generation.spec import GenerationSpec, Prompt

if TYPE_CHECKING:
    from quire.server.observe.metrics import Metrics


class BeamSearch(Generation):
    """A search that is n beams wide. Whole answers only: all of them come in one step, at the end."""

    def __init__(
        self,
        spec: GenerationSpec,
        tokenizer: Tokenizer,
        client: EngineClient,
        metrics: Metrics,
        turns: LoopTurns,
        *,
        context_length: int,
    ) -> None:
        super().__init__(spec, tokenizer, metrics)
        self._client = client
        self._turns = turns
        self._context_length = context_length
        ends = () if spec.params.ignore_eos else tokenizer.eos_token_ids
        self._ends = frozenset((*spec.params.stop_token_ids, *ends))
        self._version = client.link.weights_version
        self._call = client.begin_call(spec.answer_id, spec.tenant)
        self._cancelled: set[int] = set()
        """Indices of prompts whose search was cancelled through `EngineClient.cancel`."""
        self._streams: set[OutputStream] = set()

    @property
    def reasoning_tokens(self) -> int | None:
        """Beam search does not count them."""
        return None

    async def deltas(self) -> AsyncIterator[list[ChoiceDelta]]:
        """One step with all of every answer; none when closed before."""
        n, limit = self._spec.params.n, self._spec.timeout
        try:
            async with asyncio.timeout(limit):
                found = await asyncio.gather(*(self._search(index) for index in range(len(self._spec.prompts))))
        except TimeoutError:
            self._cut_off("timeout")
            raise Timeout(f"the answer was not complete within timeout ({limit} s)", param="timeout") from None
        except EngineError:
            self._cut_off("error")
            raise
        finally:
            self._stop()
        if not self._cut_short:
            yield [self._answer(choice, found[choice.index // n][choice.index % n]) for choice in self._choices]

    @property
    def weights_version(self) -> str:
        return self._version

    def close(self) -> None:
        """Abort what still runs; `deltas` ends."""
        self._stop()
        self._cut_off("abort")

    def _stop(self) -> None:
        self._client.end_call(self._call)
        for stream in list(self._streams):
            stream.close()

    async def _search(self, index: int) -> list[Beam]:
        """The n best hypotheses for one prompt, best first; the best so far when somebody cancels it."""
        params, width = self._spec.params, self._spec.params.n
        prompt = self._spec.prompts[index]
        longest = self._context_length - len(prompt.ids)
        longest = longest if params.max_tokens is None else min(longest, params.max_tokens)
        search = Search(width, params.logprobs or 0, self._ends, self._spec.length_penalty, longest)
        for step in range(longest):
            outputs = await self._step(index, step, prompt, search.running)
            if self._call.cancelled:
                self._cancelled.add(index)
            if self._cut_short or index in self._cancelled:
                break
            async with self._turns:
                if not search.advance(outputs):
                    break
        return [*search.best, *[Beam()] * width][:width]

    async def _step(self, index: int, step: int, prompt: Prompt, beams: Sequence[Beam]) -> list[EngineCoreOutput]:
        """One more token of every beam. Gives fewer outputs than beams when closed or cancelled meanwhile."""
        spec = self._spec
        top = max(2 * spec.params.n, spec.params.logprobs or 0)
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=top, ignore_eos=True)
        outputs: dict[str, EngineCoreOutput] = {}
        async with self._turns:
            if self._call.cancelled or self._cut_short:
                return []
            requests = [
                spec.request(f"{spec.id}-{index}-{step}-{i}", prompt, params, seed=0, then=beam.ids)
                for i, beam in enumerate(beams)
            ]
            stream = self._client.submit(requests, spec.answer_id)
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
            self._version = stream.weights_version
        self._metrics.rolling.now()
        if step == 0:
            first = self._choices[index * spec.params.n]
            first.cached_tokens = max((output.cached_tokens for output in outputs.values()), default=0)
            first.prefix = next((output.prefix for output in outputs.values()), None)
        return [outputs[request.id] for request in requests if request.id in outputs]

    def _answer(self, choice: Choice, beam: Beam) -> ChoiceDelta:
        unfinished: FinishReason = "abort" if choice.index // self._spec.params.n in self._cancelled else "length"
        reason = "stop" if beam.ended else unfinished
        last = beam.ids[-1] if beam.ids else None
        output = EngineCoreOutput(
            id="",
            new_ids=list(beam.ids),
            logprobs=None if self._spec.params.logprobs is None else list(beam.logprobs),
            finish_reason=reason,
            stop_reason=last if beam.ended and last in self._spec.params.stop_token_ids else None,
        )
        delta = choice.push(output)
        assert delta is not None, "a terminal output has a delta"
        self._end(choice, delta.finish_reason or reason)
        return delta
