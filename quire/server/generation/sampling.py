"""Generation by sampling: takes prompts and parameters, and returns text deltas step by step."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from quire.engine import clock
from quire.engine.core.history import Timeline
from quire.engine.errors import EngineError, InvalidRequest, Overloaded, QuireError
from quire.engine.link.client import EngineClient
from quire.engine.link.output_stream import add_tokens
from quire.engine.receipts.receipt import ChoiceReceipt, first_tokens
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import EngineCoreOutput
from quire.server.generation.choice import Choice, ChoiceDelta
from quire.server.generation.deadlines import Deadlines
from quire.server.generation.generation import Generation, Journal, Sink
from quire.server.generation.loop_turns import LoopTurns
from quire.server.generation.spec import GenerationSpec
from quire.server.store.progress import End, Progress

if TYPE_CHECKING:
    from quire.server.observe.metrics import Metrics


class Sampling(Generation):
    """Each choice is one request to the engine."""

    def __init__(
        self, spec: GenerationSpec, tokenizer: Tokenizer, client: EngineClient, metrics: Metrics, turns: LoopTurns
    ) -> None:
        """Submits the requests. Raises EngineError when the engine is gone."""
        super().__init__(spec, tokenizer, metrics)
        params = spec.params
        single = msgspec.structs.replace(params, n=1)
        again = f".{spec.attempt}" if spec.attempt else ""
        self._by_id = {f"{spec.id}-{choice.index}{again}": choice for choice in self._choices}
        self.progress = self._known()
        self._had = [*zip(self._by_id, map(tuple, self.progress.ids), tuple(self.progress.ends), strict=True)]
        """What each request has before it is submitted: its tokens, and its end."""
        self._as_it_comes = False
        """Whether each output says what was cached when the answer was made first, and that is noted of all choices."""
        self.fresh = False
        seeds = [params.choice_seed(choice.index % params.n) for choice in self._choices]
        requests = [
            spec.request(id, choice.prompt, single, seeds[choice.index], [*known])
            for choice, (id, known, end) in zip(self._choices, self._had, strict=True)
            if end is None
        ]
        self.computed = bool(requests)
        grows = [ids for ids, end in zip(self.progress.ids, self.progress.ends, strict=True) if end is None]
        self._stream = client.submit(requests, spec.answer_id, grows)
        self._stream.ended = self._note_end
        self._keep = client.keep
        self._journal: Journal | None = None
        self._number = 0
        """Of the first choice in the journal."""
        self._timeline = client.history.find(requests[0].id) if spec.timed and requests else None
        self._records: dict[str, ChoiceReceipt] = {}
        """By request, where they are recorded."""
        if spec.recorded:
            self._stream.versions = {id: [] for id in self._by_id}
            for choice, (id, known, _) in zip(self._choices, self._had, strict=True):
                self._records[id] = ChoiceReceipt(index=choice.index, seed=seeds[choice.index])
                add_tokens(self._stream.versions[id], self._stream.weights_version, len(known))
        self._turns = turns
        self._deadlines = Deadlines(self._stream, timeout=spec.timeout, queue_timeout=spec.queue_timeout)

    def _known(self) -> Progress:
        """The tokens that the engine need not compute again. Empty if log probabilities are requested, which the
        journal does not contain."""
        spec, count = self._spec, self._spec.num_choices
        had = spec.progress
        if had is None or not had.ids:
            return Progress([[] for _ in range(count)], [-1] * count, [None] * count)
        if spec.logprobs or spec.prompt_logprobs is not None:
            return Progress([[] for _ in range(count)], list(had.cached), [None] * count)
        if not had.ends:  # a journal of before: what ends an answer comes with its last token
            return Progress([ids[:-1] for ids in had.ids], list(had.cached), [None] * count)
        return had.copy()

    async def deltas(self) -> AsyncIterator[list[ChoiceDelta]]:
        try:
            had, self._had = self._had, []
            for request_id, known, end in had:
                for delta in self._pushed_again(request_id, known, end):
                    yield [delta]
            self.fresh = True
            async for outputs in self._stream:
                if self._spec.params.prompt_logprobs is None:
                    for step in self._pushed(outputs):
                        yield step
                elif step := [delta async for delta in self._pushed_in_turn(outputs)]:
                    yield step
        except EngineError:
            self._cut_off("error")
            raise
        finally:
            self.close()

    def _pushed_again(self, request_id: str, known: Sequence[int], end: End | None) -> Iterator[ChoiceDelta]:
        """The deltas of tokens that a choice had before, and of the end that it had come to."""
        choice = self._by_id[request_id]
        cached = self.progress.cached[choice.index]
        outputs = [EngineCoreOutput(request_id, [id], cached_tokens=cached) for id in known]
        if end is not None:
            with_token = bool(known) and end.with_token
            last = outputs.pop() if with_token else EngineCoreOutput(request_id, [], cached_tokens=cached)
            outputs.append(msgspec.structs.replace(last, finish_reason=end.reason, stop_reason=end.stop_reason))
        for output in outputs:
            if not choice.finished and (delta := self._taken(choice, output)) is not None:
                yield delta
                self._end_with(request_id, delta)

    def shorten(self, sink: Sink) -> None:
        if self._spec.params.prompt_logprobs is None:
            self._stream.shortcut = partial(self._pass_on, sink)

    def _pass_on(self, sink: Sink, outputs: list[EngineCoreOutput]) -> bool:
        """Give the sink what these outputs make, if it can take it."""
        if not sink.ready():
            return False
        for step in self._pushed(outputs):
            sink.take(step)
        return True

    def _pushed(self, outputs: list[EngineCoreOutput]) -> Iterator[list[ChoiceDelta]]:
        """The steps that outputs make: one, but of a resumable spec one for each token."""
        now = clock.monotonic()
        if self._spec.resumable and not (self._as_it_comes and len(outputs) == 1 == len(outputs[0].new_ids)):
            for output in outputs:
                for single in self._singles(output):
                    if (delta := self._push(single, now)) is not None:
                        yield [delta]
            return
        step = []
        for output in outputs:  # a comprehension takes a quarter longer for the one that there mostly is
            delta = self._push(output, now)
            if delta is not None:
                step.append(delta)
        if step:
            yield step

    async def _pushed_in_turn(self, outputs: list[EngineCoreOutput]) -> AsyncIterator[ChoiceDelta]:
        """The deltas of outputs that may hold the log probabilities of a whole prompt."""
        now = clock.monotonic()
        for whole in outputs:
            for output in self._singles(whole) if self._spec.resumable else (whole,):
                async with self._turns:
                    delta = self._push(output, now)
                if delta is not None:
                    yield delta

    def _singles(self, output: EngineCoreOutput) -> Sequence[EngineCoreOutput]:
        """An output as one for each of its tokens. What is said of its end comes with the last. One that is made again
        says what was cached when it was made first."""
        cached = self._cached(output)
        if output.cached_tokens != cached:
            output = msgspec.structs.replace(output, cached_tokens=cached)
        return (output,) if len(output.new_ids) < 2 else _apart(output)

    def _cached(self, output: EngineCoreOutput) -> int:
        """How many tokens of the prompt of an output's choice were cached when it was made first. This is noted of the
        first output."""
        told, index = self.progress.cached, self._by_id[output.id].index
        if told[index] < 0:
            told[index] = output.cached_tokens
            self._as_it_comes = self._spec.progress is None and min(told) >= 0
        return told[index]

    def keep(self, journal: Journal, number: int, had: Sequence[int]) -> None:
        self._journal, self._number = journal, number
        for choice, count, (id, *_) in zip(self._choices, had, self._had, strict=True):
            ids, end = self.progress.ids[choice.index], self.progress.ends[choice.index]
            if len(ids) > count or end is not None:
                journal.add(number, choice.index, count, ids[count:], end)
            self._keep(id, number + choice.index, journal.add_step)

    def _note_end(self, output: EngineCoreOutput, with_tokens: bool) -> None:
        """The last output of a request has come: see OutputStream.ended."""
        index, end = self._by_id[output.id].index, None
        if output.finish_reason == "stop" or output.finish_reason == "length":
            self.progress.ends[index] = end = End(output.finish_reason, output.stop_reason, with_tokens)
        if self._journal is not None:
            place = len(self.progress.ids[index]) - len(output.new_ids)
            self._journal.add(self._number, index, place, output.new_ids, end)

    def _push(self, output: EngineCoreOutput, now: float) -> ChoiceDelta | None:
        """Add an output to its choice. Returns the delta, or None when there is nothing to show yet."""
        choice = self._by_id[output.id]
        if choice.finished:  # The call was closed while this output waited to be read.
            return None
        if output.finish_reason == "error":
            self._end(choice, "error")
            self._cut_off("error")
            raise _failure(output, self._spec)
        delta = self._taken(choice, output)
        if output.new_ids:
            if choice.first_at is None:
                choice.first_at = now
                self._deadlines.first_token()
                self._metrics.first_token(now - self._began)
            choice.last_at = now
        if delta is not None:
            self._end_with(output.id, delta)
        return delta

    def _taken(self, choice: Choice, output: EngineCoreOutput) -> ChoiceDelta | None:
        if not self._records:
            return choice.push(output)
        before = choice.completion_tokens
        delta = choice.push(output)
        self._records[output.id].take(output, choice.completion_tokens - before)
        return delta

    def records(self) -> list[ChoiceReceipt]:
        for id, record in self._records.items():
            assert self._stream.versions is not None
            record.versions = first_tokens(self._stream.versions[id], len(record.token_ids))
            record.finish_reason = self._by_id[id].ended_by
        return list(self._records.values())

    def _end_with(self, request_id: str, delta: ChoiceDelta) -> None:
        """End a choice whose last delta this is."""
        if delta.finish_reason is not None:
            self._stream.abort(request_id, delta.finish_reason)  # Does nothing when the engine has ended it.
            self._end(self._by_id[request_id], delta.finish_reason)

    @property
    def timeline(self) -> Timeline | None:
        return self._timeline

    @property
    def weights_version(self) -> str:
        return self._stream.weights_version

    def close(self) -> None:
        self._deadlines.cancel()
        self._stream.close()
        for output in self._stream.unread:  # who goes on with the answer has its tokens, and is to tell this too
            self._cached(output)
        # No circle: the spec goes with its last reference, not at a collection.
        self._stream.shortcut = self._stream.ended = None
        self._cut_off(self._deadlines.passed or "abort")


def _apart(output: EngineCoreOutput) -> list[EngineCoreOutput]:
    """An output of several tokens as one for each."""
    logprobs = output.logprobs
    singles = [
        EngineCoreOutput(output.id, [id], None if logprobs is None else [logprobs[at]])
        for at, id in enumerate(output.new_ids[:-1])
    ]
    first = msgspec.structs.replace(
        singles[0],
        prompt_logprobs=output.prompt_logprobs,
        cached_tokens=output.cached_tokens,
        prefix=output.prefix,
    )
    last = msgspec.structs.replace(
        output, new_ids=output.new_ids[-1:], logprobs=logprobs and logprobs[-1:], prompt_logprobs=None
    )
    return [first, *singles[1:], last]


def _failure(output: EngineCoreOutput, spec: GenerationSpec) -> QuireError:
    message = output.error or "the engine failed this request"
    if output.cause == "grammar":
        field = spec.grammar_field
        return InvalidRequest(f"{field}: {message}" if field else message, param=field)
    if output.cause == "constraints":
        return InvalidRequest(message)
    return Overloaded(message) if output.cause == "busy" else EngineError(message)
