"""Beam search over the engine client, by the rule in engine/text/beams.py. Each step requests one more token of every
beam. The engine finds all earlier tokens in its prefix cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.output_stream import OutputStream
from quire.engine.common.errors import EngineError, Timeout
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreOutput, FinishReason
from quire.engine.text.beams import Beam, BeamSearchState
from quire.engine.text.tokenizer import Tokenizer
from quire.server.generation.choice_state import ChoiceDelta, ChoiceState
from quire.server.generation.event_loop_work_pacer import EventLoopWorkPacer
from quire.server.generation.generation import Generation
from quire.server.generation.resolved_request import GenerationRequest, Prompt

if TYPE_CHECKING:
    from quire.server.observe.metrics import Metrics


class BeamSearchGeneration(Generation):
    """All answers arrive in one step, at the end."""

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        client: EngineClient,
        metrics: Metrics,
        loop_work_pacer: EventLoopWorkPacer,
        *,
        context_length: int,
    ) -> None:
        super().__init__(request, tokenizer, metrics)
        self._client = client
        self._loop_work_pacer = loop_work_pacer
        self._context_length = context_length
        ends = () if request.params.ignore_eos else tokenizer.eos_token_ids
        self._end_token_ids = frozenset((*request.params.stop_token_ids, *ends))
        self._weights_version = client.engine_core.weights_version
        self._client_call = client.begin_call(request.answer_id, request.authorized_caller.tenant)
        self._cancelled_prompts: set[int] = set()
        self._streams: set[OutputStream] = set()

    @property
    def reasoning_tokens(self) -> int | None:
        """Beam search does not count reasoning tokens."""
        return None

    async def deltas(self) -> AsyncIterator[list[ChoiceDelta]]:
        n, limit = self.request.params.n, self.request.timeout
        try:
            async with asyncio.timeout(limit):
                beams_by_prompt = await asyncio.gather(
                    *(self._search_prompt(index) for index in range(len(self.request.prompts)))
                )
        except TimeoutError:
            self._record_open_choices_as_cut("timeout")
            raise Timeout(f"the answer was not complete within timeout ({limit} s)", param="timeout") from None
        except EngineError:
            self._record_open_choices_as_cut("error")
            raise
        finally:
            self._close_streams()
        if not self._has_cut_choices:
            yield [
                self._finish_choice(choice, beams_by_prompt[choice.index // n][choice.index % n])
                for choice in self._choices
            ]

    @property
    def weights_version(self) -> str:
        return self._weights_version

    def close(self) -> None:
        self._close_streams()
        self._record_open_choices_as_cut("abort")

    def _close_streams(self) -> None:
        self._client.end_call(self._client_call)
        for stream in list(self._streams):
            stream.close()

    async def _search_prompt(self, index: int) -> list[Beam]:
        """Returns the n best hypotheses, best first; after a cancellation, the best so far."""
        params, width = self.request.params, self.request.params.n
        prompt = self.request.prompts[index]
        max_tokens = self._context_length - len(prompt.ids)
        max_tokens = max_tokens if params.max_tokens is None else min(max_tokens, params.max_tokens)
        search = BeamSearchState(
            width, params.logprobs or 0, self._end_token_ids, self.request.length_penalty, max_tokens
        )
        for step in range(max_tokens):
            outputs = await self._request_next_tokens(index, step, prompt, search.running_beams)
            if self._client_call.cancelled:
                self._cancelled_prompts.add(index)
            if self._has_cut_choices or index in self._cancelled_prompts:
                break
            async with self._loop_work_pacer:
                if not search.advance_and_check_running(outputs):
                    break
        return [*search.best_beams_so_far, *[Beam()] * width][:width]

    async def _request_next_tokens(
        self, index: int, step: int, prompt: Prompt, beams: Sequence[Beam]
    ) -> list[EngineCoreOutput]:
        request = self.request
        num_alternatives = max(2 * request.params.n, request.params.logprobs or 0)
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=num_alternatives, ignore_eos=True)
        outputs: dict[str, EngineCoreOutput] = {}
        async with self._loop_work_pacer:
            if self._client_call.cancelled or self._has_cut_choices:
                return []
            requests = [
                request.engine_request(
                    f"{request.id}-{index}-{step}-{i}", prompt, params, seed=0, generated_ids=beam.token_ids
                )
                for i, beam in enumerate(beams)
            ]
            stream = self._client.submit(requests, request.answer_id)
        self._streams.add(stream)
        try:
            async for some in stream:
                for output in some:
                    if output.finish_reason == "error":
                        raise EngineError(output.error or "the engine failed this request")
                    if output.finish_reason == "abort":
                        self._cancelled_prompts.add(index)
                    outputs[output.id] = output
        finally:
            stream.close()
            self._streams.discard(stream)
            self._weights_version = stream.weights_version
        self._metrics.rolling_stats.update_current_bin()
        if step == 0:
            first = self._choices[index * request.params.n]
            first.cached_tokens = max((output.cached_tokens for output in outputs.values()), default=0)
            first.prefix_report = next((output.prefix for output in outputs.values()), None)
        return [outputs[request.id] for request in requests if request.id in outputs]

    def _finish_choice(self, choice: ChoiceState, beam: Beam) -> ChoiceDelta:
        unfinished: FinishReason = (
            "abort" if choice.index // self.request.params.n in self._cancelled_prompts else "length"
        )
        reason = "stop" if beam.is_finished else unfinished
        last = beam.token_ids[-1] if beam.token_ids else None
        output = EngineCoreOutput(
            id="",
            new_ids=list(beam.token_ids),
            logprobs=None if self.request.params.logprobs is None else list(beam.logprobs),
            finish_reason=reason,
            stop_reason=last if beam.is_finished and last in self.request.params.stop_token_ids else None,
        )
        delta = choice.process_output(output)
        assert delta is not None, "a terminal output has a delta"
        self._record_choice_end(choice, delta.finish_reason or reason)
        return delta
