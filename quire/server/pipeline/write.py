from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import nullcontext

from starlette.requests import Request
from starlette.responses import Response

from quire.server.durability.durable_request import DurableRequest
from quire.server.generation.choice_state import ChoiceDelta
from quire.server.generation.generation import Generation, RunningGeneration
from quire.server.generation.output_parts import CollectedChoice, collect_choices
from quire.server.generation.response_writers.answer_writer import AnswerWriter
from quire.server.generation.vector_generation import VectorGeneration, VectorRequest
from quire.server.http.sse import CLIENT_CLOSED_REQUEST, EventStream, closing_on_disconnect
from quire.server.http.write_batching import TRANSPORT_SCOPE_KEY, BatchingTransport
from quire.server.runtime.model_runtime import ModelRuntime
from quire.server.runtime.server_context import get_runtime

EndCallback = Callable[[], Awaitable[None]]
WEIGHTS_VERSION_HEADER = "X-Weights-Version"
"""The version of the weights at the last token or, for a stream, at its start."""
MAX_INLINE_NUMBERS = 2**14
"""Answers with more numbers are written in a thread, because their JSON takes milliseconds."""


async def do_nothing() -> None:
    pass


async def write_answer(
    request: Request,
    running: RunningGeneration[Generation],
    writer: AnswerWriter,
    durable: DurableRequest,
    on_written: EndCallback = do_nothing,
    *,
    reader_grace: float = 0.0,
) -> Response:
    """Awaits `on_written` before the last part is sent. `reader_grace`: seconds that a stream continues without its
    reader. Raises EngineError if the engine fails an answer that is not streamed.
    """
    if running.generation.request.stream:
        return _write_stream(request, running, writer, durable, on_written, reader_grace)
    return await _write_whole(request, running, writer, durable, on_written)


async def write_vectors(
    request: Request, running: RunningGeneration[VectorGeneration], resolved: VectorRequest
) -> Response:
    """Raises EngineError, Timeout and QueueTimeout."""
    generation = running.generation
    async with closing_on_disconnect(request.receive, running.close):
        vectors = await generation.collect_vectors()
    if vectors is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    version = generation.weights_version
    if sum(map(len, vectors)) > MAX_INLINE_NUMBERS:
        pacer = get_runtime(request).loop_work_pacer
        body = await pacer.run_in_thread(resolved.write_body, resolved, version, vectors)
    else:
        body = resolved.write_body(resolved, version, vectors)
    return Response(body, 200, {**resolved.response_headers, WEIGHTS_VERSION_HEADER: version}, "application/json")


async def _write_whole(
    request: Request,
    running: RunningGeneration[Generation],
    writer: AnswerWriter,
    durable: DurableRequest,
    on_written: EndCallback,
) -> Response:
    runtime, generation = get_runtime(request), running.generation
    resolved = generation.request
    with runtime.logprob_budget.track_call() as count_logprobs:
        async with closing_on_disconnect(request.receive, running.close):
            choices = await _collect_choices(generation, durable, count_logprobs)
        if not generation.is_complete:
            error = durable.take_over_error()
            if error is not None and not await request.is_disconnected():
                raise error
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        best = generation.select_best(choices)
        writer.weights_version = generation.weights_version
        if resolved.authorized_caller.include_receipt:
            writer.receipt = await runtime.receipt_writer.encode_answer_receipt(resolved, running)
        if resolved.logprobs or resolved.prompt_logprobs is not None:
            body = await runtime.loop_work_pacer.run_in_thread(writer.response_body, best, generation.usage)
        else:
            body = writer.response_body(best, generation.usage)
    await on_written()
    headers = {**resolved.response_headers, WEIGHTS_VERSION_HEADER: writer.weights_version}
    return Response(body, 200, headers, "application/json")


async def _collect_choices(
    generation: Generation, durable: DurableRequest, count_logprobs: Callable[[Sequence[ChoiceDelta]], None]
) -> list[CollectedChoice]:
    try:
        return await collect_choices(generation.deltas(), count_logprobs)
    except Exception:
        await durable.forget_failed_answer(generation.request)
        raise


def _write_stream(
    request: Request,
    running: RunningGeneration[Generation],
    writer: AnswerWriter,
    durable: DurableRequest,
    on_written: EndCallback,
    reader_grace: float,
) -> Response:
    runtime, generation = get_runtime(request), running.generation
    resolved = generation.request
    headers = {
        **resolved.response_headers,
        WEIGHTS_VERSION_HEADER: generation.weights_version,
        **durable.stream_headers(resolved),
    }
    writer = durable.number_events(writer, resolved)
    transport: BatchingTransport | None = request.scope.get(TRANSPORT_SCOPE_KEY)
    close = running.close
    if reader_grace:
        transport = None
        events = stream_events(running, writer, runtime, on_written)
        events, close = durable.keep_streaming_without_reader(writer, running, events, reader_grace)
    else:
        events = stream_events(running, writer, runtime, on_written, transport)
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


async def stream_events(
    running: RunningGeneration[Generation],
    writer: AnswerWriter,
    runtime: ModelRuntime,
    on_written: EndCallback,
    transport: BatchingTransport | None = None,
) -> AsyncGenerator[bytes]:
    """Unless the stream repeats its log probabilities at the end, steps that arrive while the reader waits are written
    directly to `transport`, except the first and the last.
    """
    generation = running.generation
    resolved = generation.request
    if resolved.continuous_usage:
        writer.set_usage(generation.usage)
    opening, is_first = writer.first_events(), True
    keeps_logprobs = resolved.logprobs and writer.keeps_logprobs_until_end
    with runtime.logprob_budget.track_call() if keeps_logprobs else nullcontext(_count_nothing) as count_logprobs:
        async for step in generation.deltas():
            count_logprobs(step)
            writer.weights_version = generation.weights_version
            if resolved.continuous_usage:
                writer.set_usage(generation.usage)
            if resolved.echo and resolved.logprobs:  # one step may hold the whole prompt's log probabilities
                yield opening + await runtime.loop_work_pacer.run_in_thread(writer.step_events, step)
            elif events := opening + writer.step_events(step):  # empty if a resumed stream's reader has them
                yield events
                if is_first and transport is not None and not keeps_logprobs:
                    generation.attach_sink(TransportSink(generation, writer, transport))
                is_first = False
            opening = b""
        if generation.is_complete:
            writer.weights_version = generation.weights_version
            if resolved.authorized_caller.include_receipt:
                writer.receipt = await runtime.receipt_writer.encode_answer_receipt(resolved, running)
            last = writer.last_events(generation.usage)
            await on_written()
            if last:
                yield last


def _count_nothing(step: Sequence[ChoiceDelta]) -> None:
    pass


class TransportSink:
    """It has few fields, because touching memory costs more than the work per token."""

    __slots__ = ("_generation", "_includes_usage", "_transport", "_writer")

    def __init__(self, generation: Generation, writer: AnswerWriter, transport: BatchingTransport) -> None:
        self._generation = generation
        self._writer = writer
        self._transport = transport
        self._includes_usage = generation.request.continuous_usage

    def can_take_step(self) -> bool:
        return self._transport.writable

    def take_step(self, step: list[ChoiceDelta]) -> None:
        writer, generation = self._writer, self._generation
        writer.weights_version = generation.weights_version
        if self._includes_usage:
            writer.set_usage(generation.usage)
        self._transport.write_chunk(writer.step_events(step))
