"""Generation by sampling: prompts and parameters in, text deltas out, step by step."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial

import msgspec

from quire.engine.client.client import EngineClient
from quire.engine.errors import EngineError, InvalidRequest, Overloaded, QuireError
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import RequestOutput
from quire.server.generation.choice import ChoiceDelta
from quire.server.generation.deadlines import Deadlines
from quire.server.generation.generation import Generation, Sink
from quire.server.generation.spec import GenerationSpec
from quire.server.generation.turns import Turns
from quire.server.observe.metrics import Metrics


class Sampling(Generation):
    """Each choice is one request to the engine."""

    def __init__(
        self, spec: GenerationSpec, tokenizer: Tokenizer, client: EngineClient, metrics: Metrics, turns: Turns
    ) -> None:
        """Submits the requests. Raises EngineError when the engine is gone."""
        super().__init__(spec, tokenizer, metrics)
        params = spec.params
        single = msgspec.structs.replace(params, n=1)
        self._by_id = {f"{spec.id}-{choice.index}": choice for choice in self._choices}
        requests = [
            spec.request(request_id, choice.prompt.ids, single, params.choice_seed(choice.index % params.n))
            for request_id, choice in self._by_id.items()
        ]
        self._stream = client.submit(requests, spec.answer_id)
        self._turns = turns
        self._deadlines = Deadlines(self._stream, timeout=spec.timeout, queue_timeout=spec.queue_timeout)

    async def deltas(self) -> AsyncIterator[list[ChoiceDelta]]:
        try:
            async for outputs in self._stream:
                if self._spec.params.prompt_logprobs is None:
                    step = self._pushed(outputs)
                else:
                    step = [delta async for delta in self._pushed_in_turn(outputs)]
                if step:
                    yield step
        except EngineError:
            self._cut_off("error")
            raise
        finally:
            self.close()

    def shorten(self, sink: Sink) -> None:
        if self._spec.params.prompt_logprobs is None:
            self._stream.shortcut = partial(self._pass_on, sink)

    def _pass_on(self, sink: Sink, outputs: list[RequestOutput]) -> bool:
        """Give the sink what these outputs make, if it can take it."""
        if not sink.ready():
            return False
        if step := self._pushed(outputs):
            sink.take(step)
        return True

    def _pushed(self, outputs: list[RequestOutput]) -> list[ChoiceDelta]:
        now, step = time.monotonic(), []
        for output in outputs:  # a comprehension takes a quarter longer for the one that there mostly is
            delta = self._push(output, now)
            if delta is not None:
                step.append(delta)
        return step

    async def _pushed_in_turn(self, outputs: list[RequestOutput]) -> AsyncIterator[ChoiceDelta]:
        """The deltas of outputs that may hold the log probabilities of a whole prompt."""
        now = time.monotonic()
        for output in outputs:
            async with self._turns:
                delta = self._push(output, now)
            if delta is not None:
                yield delta

    def _push(self, output: RequestOutput, now: float) -> ChoiceDelta | None:
        """Add an output to its choice. Returns the delta, or None when there is nothing to show yet."""
        choice = self._by_id[output.id]
        if choice.finished:  # The call was closed while this output waited to be read.
            return None
        if output.finish_reason == "error":
            self._end(choice, "error")
            self._cut_off("error")
            raise _failure(output, self._spec)
        delta = choice.push(output)
        if output.new_ids:
            if choice.first_at is None:
                choice.first_at = now
                self._deadlines.first_token()
                self._metrics.first_token(now - self._began)
            else:
                self._metrics.next_token(now - choice.last_at)
            choice.last_at = now
        if delta is not None and delta.finish_reason is not None:
            self._stream.abort(output.id, delta.finish_reason)  # Does nothing when the engine has ended it.
            self._end(choice, delta.finish_reason)
        return delta

    @property
    def weights_version(self) -> str:
        return self._stream.weights_version

    def close(self) -> None:
        self._deadlines.cancel()
        self._stream.close()
        self._stream.shortcut = None  # no circle: the spec goes with its last reference, not at a collection
        self._cut_off(self._deadlines.passed or "abort")


def _failure(output: RequestOutput, spec: GenerationSpec) -> QuireError:
    message = output.error or "the engine failed this request"
    if output.cause == "grammar":
        field = spec.grammar_field
        return InvalidRequest(f"{field}: {message}" if field else message, param=field)
    return Overloaded(message) if output.cause == "busy" else EngineError(message)
