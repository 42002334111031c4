from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from quire.engine.client.output_stream import OutputSource
from quire.engine.client.request_history import Timeline
from quire.engine.common import clock
from quire.engine.common.errors import EngineError, InvalidRequest, Overloaded, QueueTimeout, QuireError, Timeout
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest
from quire.engine.text.tokenizer import Tokenizer
from quire.server.generation.choice_state import ChoiceDelta
from quire.server.generation.event_loop_work_pacer import EventLoopWorkPacer
from quire.server.generation.generation import DeltaSink, Generation
from quire.server.generation.resolved_request import GenerationRequest

if TYPE_CHECKING:
    from quire.server.observe.metrics import Metrics


class SamplingGeneration(Generation):
    """Each choice is one engine request."""

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        engine_requests: Sequence[EngineCoreRequest],
        outputs: OutputSource,
        metrics: Metrics,
        loop_work_pacer: EventLoopWorkPacer,
        timeline: Timeline | None,
    ) -> None:
        super().__init__(request, tokenizer, metrics)
        self._choices_by_id = {each.id: choice for each, choice in zip(engine_requests, self._choices, strict=True)}
        self._outputs = outputs
        self._loop_work_pacer = loop_work_pacer
        self._timeline = timeline
        self._sink: DeltaSink | None = None

    async def deltas(self) -> AsyncIterator[list[ChoiceDelta]]:
        try:
            async for outputs in self._outputs:
                if self.request.params.prompt_logprobs is None:
                    step = self._process_outputs(outputs)
                else:
                    step = await self._process_prompt_logprobs(outputs)
                if step:
                    yield step
        except EngineError:
            self._record_open_choices_as_cut("error")
            raise
        except (Timeout, QueueTimeout) as error:
            self._record_open_choices_as_cut(error.param or "timeout")
            raise
        finally:
            self.close()

    def attach_sink(self, sink: DeltaSink) -> None:
        if self.request.params.prompt_logprobs is None:
            self._sink = sink
            self._outputs.sink = self

    def can_take_outputs(self) -> bool:
        return self._sink is not None and self._sink.can_take_step()

    def take_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        assert self._sink is not None
        if step := self._process_outputs(outputs):
            self._sink.take_step(step)

    def _process_outputs(self, outputs: list[EngineCoreOutput]) -> list[ChoiceDelta]:
        now = clock.monotonic()
        step = []
        for output in outputs:  # a comprehension is 25 % slower in the usual one-output case
            delta = self._process_output(output, now)
            if delta is not None:
                step.append(delta)
        return step

    async def _process_prompt_logprobs(self, outputs: list[EngineCoreOutput]) -> list[ChoiceDelta]:
        """Handles one output per turn of the event loop, because one may hold a whole prompt's log probabilities."""
        step = []
        for output in outputs:
            async with self._loop_work_pacer:
                step += self._process_outputs([output])
        return step

    def _process_output(self, output: EngineCoreOutput, now: float) -> ChoiceDelta | None:
        choice = self._choices_by_id[output.id]
        if choice.is_finished:  # closed before this output was read
            return None
        if output.finish_reason == "error":
            self._record_choice_end(choice, "error")
            self._record_open_choices_as_cut("error")
            raise _output_error(output, self.request)
        delta = choice.process_output(output)
        if output.new_ids:
            if choice.first_token_time is None and not self._outputs.is_replaying:
                choice.first_token_time = now
                self._metrics.observe_first_token(now - self._start_time)
            choice.last_token_time = now
        if delta is not None and delta.finish_reason is not None:
            self._outputs.abort(output.id, delta.finish_reason)  # no effect if the engine has ended it
            self._record_choice_end(choice, delta.finish_reason)
        return delta

    @property
    def timeline(self) -> Timeline | None:
        return self._timeline

    @property
    def weights_version(self) -> str:
        return self._outputs.weights_version

    def close(self) -> None:
        self._outputs.close()
        # Lets the request be freed without garbage collection.
        self._outputs.sink = self._sink = None
        self._record_open_choices_as_cut("abort")


def _output_error(output: EngineCoreOutput, request: GenerationRequest) -> QuireError:
    message = output.error or "the engine failed this request"
    if output.cause == "grammar":
        field = None if request.checked_grammar is None else request.checked_grammar.field
        return InvalidRequest(f"{field}: {message}" if field else message, param=field)
    if output.cause == "constraints":
        return InvalidRequest(message)
    return Overloaded(message) if output.cause == "busy" else EngineError(message)
