"""From a spec to the response: admit it, let the engine compute, and answer streamed or whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.common.errors import InvalidRequest
from quire.server.access.admission import AdmissionTicket, admission_of
from quire.server.access.authentication import tenant_of
from quire.server.access.memory_lease import lease_of
from quire.server.generation.background import RunningAnswer
from quire.server.generation.beam_search_generation import BeamSearchGeneration
from quire.server.generation.choice_state import ChoiceDelta
from quire.server.generation.generation import Generation
from quire.server.generation.output_parts import CollectedChoice, collect_choices
from quire.server.generation.request_specs import GenerationSpec
from quire.server.generation.response_writers.answer_writer import AnswerWriter
from quire.server.generation.response_writers.event_ids import EventIdWriter
from quire.server.generation.sampling_generation import SamplingGeneration
from quire.server.generation.vector_generation import VectorGeneration, VectorSpec
from quire.server.resumable_calls import (
    IDEMPOTENCY_HEADER,
    JOURNAL_BODY_SCOPE_KEY,
    KEEP_ALIVE_HEADER,
    RESUMED_SCOPE_KEY,
    parse_stream_grace_header,
    still_answering_error,
)
from quire.server.resumption import all_compute_fingerprints
from quire.server.routes.bodies import WEIGHTS_VERSION, here_of, of_caller, owner_of
from quire.server.runtime.model_runtime import ModelRuntime, get_runtime
from quire.server.runtime.server_context import get_server_context
from quire.server.served_model import get_model
from quire.server.sse import CLIENT_CLOSED_REQUEST, EventStream, closing_on_disconnect
from quire.server.write_batching import TRANSPORT_SCOPE_KEY, BatchingTransport

Started = TypeVar("Started", Generation, VectorGeneration)
QUICK_NUMBERS = 2**14
"""Of an answer; JSON of so many takes a few milliseconds, and a thread makes it of more."""
STREAM_ID = "X-Stream-Id"
"""The header of a stream that can be resumed: GET /v1/streams/{id}."""


COMPUTED_BY = "X-Computed-By"
"""The header of a stream whose tokens were not all computed by the same: the fingerprints, in their order."""


async def nothing() -> None:
    pass


async def reply(
    request: Request, spec: GenerationSpec, writer: AnswerWriter, ended: Callable[[], Awaitable[None]] = nothing
) -> Response:
    """`ended` is awaited when the writer has written a whole answer, before the answer's last part is sent.

    Raises what `begin` and Kept.call's function raise, and EngineError if the engine failed an answer that is not
    streamed.
    """
    runtime = get_runtime(request)
    keep = parse_stream_grace_header(
        request, 0 if get_server_context(request).resumable_calls is None else runtime.config.stream_grace
    )
    if keep and not (spec.stream and spec.resumable):
        raise InvalidRequest(f"{KEEP_ALIVE_HEADER}: only for a stream that can be resumed", param=KEEP_ALIVE_HEADER)
    generation, close = begin(request, spec)
    close = await journaled(request, spec, generation, close)
    if spec.stream:
        return _streamed(request, spec, writer, generation, close, ended, keep)
    with runtime.logprob_budget.track_call() as count:
        async with closing_on_disconnect(request.receive, close):
            answers = await _folded(request, spec, generation, count)
        if not generation.is_complete:
            if IDEMPOTENCY_HEADER in request.headers and not await request.is_disconnected():
                raise still_answering_error()  # which took it over
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        best = generation.select_best(answers)
        writer.weights_version = generation.weights_version
        if spec.include_receipt:
            writer.receipt = await runtime.receipt_writer.encode_answer_receipt(spec, generation)
        if spec.logprobs or spec.prompt_logprobs is not None:
            body = await runtime.loop_work_pacer.run_in_thread(writer.response_body, best, generation.usage)
        else:
            body = writer.response_body(best, generation.usage)
    await ended()
    headers = {**spec.headers, WEIGHTS_VERSION: writer.weights_version}
    return Response(body, 200, headers, "application/json")


def _streamed(
    request: Request,
    spec: GenerationSpec,
    writer: AnswerWriter,
    generation: Generation,
    close: Callable[[], None],
    ended: Callable[[], Awaitable[None]],
    keep: float,
) -> Response:
    """`keep`: seconds for which the answer goes on without its reader."""
    runtime, transport = get_runtime(request), request.scope.get(TRANSPORT_SCOPE_KEY)
    headers = {**spec.headers, WEIGHTS_VERSION: generation.weights_version}
    if spec.resumable:
        resumed, here = request.scope.get(RESUMED_SCOPE_KEY), here_of(request)
        by = () if resumed is None else all_compute_fingerprints(resumed, here)
        others = len(by) > 1  # also before this process: the reader may have tokens of any of them
        alters = others or not here.deterministic
        seen = () if resumed is None else resumed.seen_events
        writer = EventIdWriter(writer, spec, seen, (lambda: not generation.is_new_step) if alters else None)
        headers[STREAM_ID] = spec.id
        if others:
            headers[COMPUTED_BY] = ", ".join(by)
    if keep:
        transport = None
        events, close = _kept_alive(request, spec, writer, generation, close, ended, keep)
    else:
        events = events_of(generation, writer, spec, runtime, ended, transport)
    return EventStream(
        events,
        close,
        headers,
        runtime.config,
        content_type=writer.MEDIA_TYPE,
        ping=writer.ping_event,
        encode_error=writer.error_event,
        transport=transport,
    )


def _kept_alive(
    request: Request,
    spec: GenerationSpec,
    writer: AnswerWriter,
    generation: Generation,
    close: Callable[[], None],
    ended: Callable[[], Awaitable[None]],
    seconds: float,
) -> tuple[AsyncGenerator[bytes], Callable[[], None]]:
    """The events of a stream that goes on for a while after its reader has left, and the function to call when the
    reader leaves."""
    background, key = get_server_context(request).background, (owner_of(request), spec.id)
    held = lease_of(request.scope).move_to_new_lease()

    async def end() -> None:
        held.release_lease()

    running = RunningAnswer(writer, close, [])
    events = events_of(generation, writer, spec, get_runtime(request), ended)
    background.start_answer(key, running, events, end)
    return running.follow_events(-1), partial(background.schedule_close_after_reader_left, key, running, seconds)


async def _folded(
    request: Request, spec: GenerationSpec, generation: Generation, count: Callable[[Sequence[ChoiceDelta]], None]
) -> list[CollectedChoice]:
    """The whole answers. A call that failed may be sent again with the same Idempotency-Key."""
    try:
        return await collect_choices(generation.deltas(), count)
    except Exception:
        if (
            IDEMPOTENCY_HEADER in request.headers
            and (streams := get_server_context(request).resumable_calls) is not None
        ):
            await streams.forget_call(owner_of(request), spec.id)
        raise


async def journaled(
    request: Request, spec: GenerationSpec, generation: Generation, close: Callable[[], None]
) -> Callable[[], None]:
    """The function that ends the call. A call that can be asked for again is in the journal before its first event is
    sent."""
    streams = get_server_context(request).resumable_calls
    if (
        streams is None
        or JOURNAL_BODY_SCOPE_KEY not in request.scope
        or not (spec.resumable or IDEMPOTENCY_HEADER in request.headers)
    ):
        return close
    try:
        return await streams.journal_call_and_wrap_close(
            request, owner_of(request), spec, here_of(request), generation, close
        )
    except BaseException:
        close()
        raise


def admitted(
    request: Request,
    spec: GenerationSpec | VectorSpec,
    start: Callable[[], Started],
    *,
    prompts: int,
    n: int = 1,
    max_tokens: int | None = None,
) -> tuple[Started, AdmissionTicket]:
    """Admit a call and `start` its work. Whoever ends the work settles the reservation.

    Raises what Admission.admit_generation raises, and EngineError if the engine is gone.
    """
    reservation = admission_of(request).admit_generation(
        tenant_of(request.scope),
        num_prompts=prompts,
        prompt_tokens=spec.prompt_tokens,
        n=n,
        max_tokens=max_tokens,
        priority=spec.priority,
    )
    name = get_model(request).names[0] if spec.adapter is None else spec.adapter.name
    get_runtime(request).request_log.register_answer_record(request.scope, spec.id, spec.answer_id, name)
    try:
        return start(), reservation
    except Exception:
        reservation.settle_usage(0)
        raise


async def vectors_reply(request: Request, spec: VectorSpec) -> Response:
    """Raises what `admitted` raises, and EngineError, Timeout and QueueTimeout."""
    runtime, spec = get_runtime(request), of_caller(request, spec)
    start = partial(VectorGeneration, spec, runtime.client, runtime.metrics)
    work, reservation = admitted(request, spec, start, prompts=len(spec.inputs))

    def close() -> None:
        work.close()
        reservation.settle_usage(spec.prompt_tokens)

    async with closing_on_disconnect(request.receive, close):
        vectors = await work.collect_vectors()
    if vectors is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    version = work.weights_version
    if sum(map(len, vectors)) > QUICK_NUMBERS:
        body = await runtime.loop_work_pacer.run_in_thread(spec.write_body, spec, version, vectors)
    else:
        body = spec.write_body(spec, version, vectors)
    return Response(body, 200, {**spec.headers, WEIGHTS_VERSION: version}, "application/json")


def start(spec: GenerationSpec, runtime: ModelRuntime) -> Generation:
    """The generation that a spec asks for. Raises EngineError when the engine is gone."""
    common = spec, runtime.model.tokenizer, runtime.client, runtime.metrics, runtime.loop_work_pacer
    if spec.beam_search:
        return BeamSearchGeneration(*common, context_length=runtime.model.context_length)
    return SamplingGeneration(*common)


def begin(request: Request, spec: GenerationSpec) -> tuple[Generation, Callable[[], None]]:
    """Admit a call and start its generation. The caller must call the returned function when it is done. Raises what
    `admitted` raises."""
    runtime, params = get_runtime(request), spec.params
    generation, reservation = admitted(
        request,
        spec,
        partial(start, spec, runtime),
        prompts=len(spec.prompts),
        n=params.n,
        max_tokens=params.max_tokens,
    )
    closed = False

    def close() -> None:
        nonlocal closed
        generation.close()
        reservation.settle_usage(generation.usage.total_tokens)
        if not closed:
            closed = True
            runtime.receipt_writer.log_answer(spec, generation)

    return generation, close


def _count_nothing(step: Sequence[ChoiceDelta]) -> None:
    pass


class Chunks:
    """Writes steps directly to a transport, as chunks of a body that has begun. It is kept small, because the memory
    that it touches costs more for each token than what it does."""

    __slots__ = ("_generation", "_transport", "_usage", "_writer")

    def __init__(
        self, generation: Generation, writer: AnswerWriter, transport: BatchingTransport, *, usage: bool
    ) -> None:
        """`usage`: tell it with each step."""
        self._generation = generation
        self._writer = writer
        self._transport = transport
        self._usage = usage

    def can_take_step(self) -> bool:
        return self._transport.writable

    def take_step(self, step: list[ChoiceDelta]) -> None:
        writer, generation = self._writer, self._generation
        writer.weights_version = generation.weights_version
        if self._usage:
            writer.set_usage(generation.usage)
        self._transport.write_chunk(writer.step_events(step))


async def events_of(
    generation: Generation,
    writer: AnswerWriter,
    spec: GenerationSpec,
    runtime: ModelRuntime,
    ended: Callable[[], Awaitable[None]],
    transport: BatchingTransport | None = None,
) -> AsyncGenerator[bytes]:
    """The events of a stream, one chunk for each step. If `transport` is given, steps that arrive while the stream
    waits are written to it directly, except the first and the last."""
    if spec.continuous_usage:
        writer.set_usage(generation.usage)
    opening, first = writer.first_events(), True
    keeps = spec.logprobs and writer.keeps_logprobs_until_end
    with runtime.logprob_budget.track_call() if keeps else nullcontext(_count_nothing) as count:
        async for step in generation.deltas():
            count(step)
            writer.weights_version = generation.weights_version
            if spec.continuous_usage:
                writer.set_usage(generation.usage)
            if spec.echo and spec.logprobs:  # all of the prompt's may come in one step
                yield opening + await runtime.loop_work_pacer.run_in_thread(writer.step_events, step)
            elif events := opening + writer.step_events(step):  # else the reader of a stream that goes on has seen them
                yield events
                if first and transport is not None and not keeps:
                    generation.attach_sink(Chunks(generation, writer, transport, usage=spec.continuous_usage))
                first = False
            opening = b""
        if generation.is_complete:
            writer.weights_version = generation.weights_version
            if spec.include_receipt:
                writer.receipt = await runtime.receipt_writer.encode_answer_receipt(spec, generation)
            last = writer.last_events(generation.usage)
            await ended()
            if last:
                yield last
