"""Generation by sampling: takes prompts and parameters, and returns text deltas step by step."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.output_stream import add_tokens
from quire.engine.common import clock
from quire.engine.common.errors import EngineError, InvalidRequest, Overloaded, QuireError
from quire.engine.common.types import EngineCoreOutput
from quire.engine.core.request_history import Timeline
from quire.engine.receipts.receipt import ChoiceReceipt, truncate_weight_versions
from quire.engine.text.tokenizer import Tokenizer
from quire.server.generation.choice_state import ChoiceDelta, ChoiceState
from quire.server.generation.deadlines import Deadlines
from quire.server.generation.event_loop_work_pacer import EventLoopWorkPacer
from quire.server.generation.generation import DeltaSink, Generation, TokenJournal
from quire.server.generation.resolved_request import GenerationRequest
from quire.server.store.progress import CallProgress, ChoiceFinish

if TYPE_CHECKING:
    from quire.server.observe.metrics import Metrics


class SamplingGeneration(Generation):
    """Each choice is one request to the engine."""

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        client: EngineClient,
        metrics: Metrics,
        loop_work_pacer: EventLoopWorkPacer,
    ) -> None:
        """Submits the requests. Raises EngineError when the engine is gone."""
        super().__init__(request, tokenizer, metrics)
        identity = request.answer_identity
        params = request.sampling_params
        single_params = msgspec.structs.replace(params, n=1)
        attempt_suffix = f".{identity.num_earlier_attempts}" if identity.num_earlier_attempts else ""
        self._is_resumable = identity.resumable
        self._choices_by_id = {f"{request.id}-{choice.index}{attempt_suffix}": choice for choice in self._choices}
        self.progress = self._progress_to_resume_from()
        self._resumed_requests = [
            *zip(self._choices_by_id, map(tuple, self.progress.ids), tuple(self.progress.ends), strict=True)
        ]
        """What each request has before it is submitted: its tokens, and its end."""
        self._cached_tokens_known = False
        """Whether each output says what was cached when the answer was made first, and that is noted of all choices."""
        self.is_new_step = False
        seeds = [params.choice_seed(choice.index % params.n) for choice in self._choices]
        requests = [
            request.engine_request(id, choice.prompt, single_params, seeds[choice.index], [*known])
            for choice, (id, known, end) in zip(self._choices, self._resumed_requests, strict=True)
            if end is None
        ]
        self.needs_engine = bool(requests)
        growing_ids = [ids for ids, end in zip(self.progress.ids, self.progress.ends, strict=True) if end is None]
        self._stream = client.submit(requests, request.answer_id, growing_ids)
        self._stream.ended = self._journal_choice_end
        self._journal_request = client.keep
        self._journal: TokenJournal | None = None
        self._first_journal_number = 0
        """Of the first choice in the journal."""
        self._timeline = client.history.find_timeline(requests[0].id) if request.include_metrics and requests else None
        self._receipts_by_id: dict[str, ChoiceReceipt] = {}
        """By request, where they are recorded."""
        if request.authorized_caller.record_receipt:
            self._stream.versions = {id: [] for id in self._choices_by_id}
            for choice, (id, known, _) in zip(self._choices, self._resumed_requests, strict=True):
                self._receipts_by_id[id] = ChoiceReceipt(index=choice.index, seed=seeds[choice.index])
                add_tokens(self._stream.versions[id], self._stream.weights_version, len(known))
        self._loop_work_pacer = loop_work_pacer
        self._deadlines = Deadlines(self._stream, timeout=request.timeout, queue_timeout=request.queue_timeout)

    def _progress_to_resume_from(self) -> CallProgress:
        """The tokens that the engine need not compute again. Empty if log probabilities are requested, which the
        journal does not contain."""
        request, count = self.request, self.request.num_choices
        had = request.answer_identity.progress
        if had is None or not had.ids:
            return CallProgress([[] for _ in range(count)], [-1] * count, [None] * count)
        if request.logprobs or request.prompt_logprobs is not None:
            return CallProgress([[] for _ in range(count)], list(had.cached), [None] * count)
        if not had.ends:  # a journal of before: what ends an answer comes with its last token
            return CallProgress([ids[:-1] for ids in had.ids], list(had.cached), [None] * count)
        return had.copy()

    async def deltas(self) -> AsyncIterator[list[ChoiceDelta]]:
        try:
            had, self._resumed_requests = self._resumed_requests, []
            for request_id, known, end in had:
                for delta in self._replayed_deltas(request_id, known, end):
                    yield [delta]
            self.is_new_step = True
            async for outputs in self._stream:
                if self.request.params.prompt_logprobs is None:
                    for step in self._outputs_to_delta_steps(outputs):
                        yield step
                elif step := [delta async for delta in self._paced_deltas_with_prompt_logprobs(outputs)]:
                    yield step
        except EngineError:
            self._record_open_choices_as_cut("error")
            raise
        finally:
            self.close()

    def _replayed_deltas(
        self, request_id: str, known: Sequence[int], end: ChoiceFinish | None
    ) -> Iterator[ChoiceDelta]:
        """The deltas of tokens that a choice had before, and of the end that it had come to."""
        choice = self._choices_by_id[request_id]
        cached = self.progress.cached[choice.index]
        outputs = [EngineCoreOutput(request_id, [id], cached_tokens=cached) for id in known]
        if end is not None:
            with_token = bool(known) and end.came_with_token
            last = outputs.pop() if with_token else EngineCoreOutput(request_id, [], cached_tokens=cached)
            outputs.append(msgspec.structs.replace(last, finish_reason=end.finish_reason, stop_reason=end.stop_reason))
        for output in outputs:
            if not choice.is_finished and (delta := self._add_output_to_choice(choice, output)) is not None:
                yield delta
                self._end_choice_if_last_delta(request_id, delta)

    def attach_sink(self, sink: DeltaSink) -> None:
        if self.request.params.prompt_logprobs is None:
            self._stream.shortcut = partial(self._pass_to_sink, sink)

    def _pass_to_sink(self, sink: DeltaSink, outputs: list[EngineCoreOutput]) -> bool:
        """Give the sink what these outputs make, if it can take it."""
        if not sink.can_take_step():
            return False
        for step in self._outputs_to_delta_steps(outputs):
            sink.take_step(step)
        return True

    def _outputs_to_delta_steps(self, outputs: list[EngineCoreOutput]) -> Iterator[list[ChoiceDelta]]:
        """The steps that outputs make: one, but of a resumable request one for each token."""
        now = clock.monotonic()
        if self._is_resumable and not (self._cached_tokens_known and len(outputs) == 1 == len(outputs[0].new_ids)):
            for output in outputs:
                for single in self._split_output(output):
                    if (delta := self._process_output(single, now)) is not None:
                        yield [delta]
            return
        step = []
        for output in outputs:  # a comprehension takes a quarter longer for the one that there mostly is
            delta = self._process_output(output, now)
            if delta is not None:
                step.append(delta)
        if step:
            yield step

    async def _paced_deltas_with_prompt_logprobs(self, outputs: list[EngineCoreOutput]) -> AsyncIterator[ChoiceDelta]:
        """The deltas of outputs that may hold the log probabilities of a whole prompt."""
        now = clock.monotonic()
        for whole in outputs:
            for output in self._split_output(whole) if self._is_resumable else (whole,):
                async with self._loop_work_pacer:
                    delta = self._process_output(output, now)
                if delta is not None:
                    yield delta

    def _split_output(self, output: EngineCoreOutput) -> Sequence[EngineCoreOutput]:
        """An output as one for each of its tokens. What is said of its end comes with the last. One that is made again
        says what was cached when it was made first."""
        cached = self._record_first_cached_tokens(output)
        if output.cached_tokens != cached:
            output = msgspec.structs.replace(output, cached_tokens=cached)
        return (output,) if len(output.new_ids) < 2 else _split_into_single_tokens(output)

    def _record_first_cached_tokens(self, output: EngineCoreOutput) -> int:
        """How many tokens of the prompt of an output's choice were cached when it was made first. This is noted of the
        first output."""
        cached_counts, index = self.progress.cached, self._choices_by_id[output.id].index
        if cached_counts[index] < 0:
            cached_counts[index] = output.cached_tokens
            self._cached_tokens_known = self.request.answer_identity.progress is None and min(cached_counts) >= 0
        return cached_counts[index]

    def attach_journal(self, journal: TokenJournal, number: int, had: Sequence[int]) -> None:
        self._journal, self._first_journal_number = journal, number
        for choice, count, (id, *_) in zip(self._choices, had, self._resumed_requests, strict=True):
            ids, end = self.progress.ids[choice.index], self.progress.ends[choice.index]
            if len(ids) > count or end is not None:
                journal.log_tokens(number, choice.index, count, ids[count:], end)
            self._journal_request(id, number + choice.index, journal.log_step)

    def _journal_choice_end(self, output: EngineCoreOutput, with_tokens: bool) -> None:
        """The last output of a request has come: see OutputStream.ended."""
        index, end = self._choices_by_id[output.id].index, None
        if output.finish_reason == "stop" or output.finish_reason == "length":
            self.progress.ends[index] = end = ChoiceFinish(output.finish_reason, output.stop_reason, with_tokens)
        if self._journal is not None:
            place = len(self.progress.ids[index]) - len(output.new_ids)
            self._journal.log_tokens(self._first_journal_number, index, place, output.new_ids, end)

    def _process_output(self, output: EngineCoreOutput, now: float) -> ChoiceDelta | None:
        """Add an output to its choice. Returns the delta, or None when there is nothing to show yet."""
        choice = self._choices_by_id[output.id]
        if choice.is_finished:  # The call was closed while this output waited to be read.
            return None
        if output.finish_reason == "error":
            self._record_choice_end(choice, "error")
            self._record_open_choices_as_cut("error")
            raise _output_error(output, self.request)
        delta = self._add_output_to_choice(choice, output)
        if output.new_ids:
            if choice.first_token_time is None:
                choice.first_token_time = now
                self._deadlines.stop_queue_timer()
                self._metrics.observe_first_token(now - self._start_time)
            choice.last_token_time = now
        if delta is not None:
            self._end_choice_if_last_delta(output.id, delta)
        return delta

    def _add_output_to_choice(self, choice: ChoiceState, output: EngineCoreOutput) -> ChoiceDelta | None:
        if not self._receipts_by_id:
            return choice.process_output(output)
        before = choice.completion_tokens
        delta = choice.process_output(output)
        self._receipts_by_id[output.id].add_output(output, choice.completion_tokens - before)
        return delta

    def choice_receipts(self) -> list[ChoiceReceipt]:
        for id, record in self._receipts_by_id.items():
            assert self._stream.versions is not None
            record.versions = truncate_weight_versions(self._stream.versions[id], len(record.token_ids))
            record.finish_reason = self._choices_by_id[id].end_reason
        return list(self._receipts_by_id.values())

    def _end_choice_if_last_delta(self, request_id: str, delta: ChoiceDelta) -> None:
        """End a choice whose last delta this is."""
        if delta.finish_reason is not None:
            self._stream.abort(request_id, delta.finish_reason)  # Does nothing when the engine has ended it.
            self._record_choice_end(self._choices_by_id[request_id], delta.finish_reason)

    @property
    def timeline(self) -> Timeline | None:
        return self._timeline

    @property
    def weights_version(self) -> str:
        return self._stream.weights_version

    def close(self) -> None:
        self._deadlines.cancel_timers()
        self._stream.close()
        for output in self._stream.unread:  # who goes on with the answer has its tokens, and is to tell this too
            self._record_first_cached_tokens(output)
        # No circle: the request goes with its last reference, not at a collection.
        self._stream.shortcut = self._stream.ended = None
        self._record_open_choices_as_cut(self._deadlines.expired_param or "abort")


def _split_into_single_tokens(output: EngineCoreOutput) -> list[EngineCoreOutput]:
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


def _output_error(output: EngineCoreOutput, request: GenerationRequest) -> QuireError:
    message = output.error or "the engine failed this request"
    if output.cause == "grammar":
        field = None if request.checked_grammar is None else request.checked_grammar.field
        return InvalidRequest(f"{field}: {message}" if field else message, param=field)
    if output.cause == "constraints":
        return InvalidRequest(message)
    return Overloaded(message) if output.cause == "busy" else EngineError(message)
