"""From a spec to the response: admit it, let the engine compute, and answer streamed or whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.errors import InvalidRequest
from quire.server.access.admission import Admitted, admission_of
from quire.server.access.authentication import tenant_of
from quire.server.access.held import hold_of
from quire.server.again import computed_by
from quire.server.bursts import TRANSPORT, BurstTransport
from quire.server.generation.answers.numbered import NumberedWriter
from quire.server.generation.answers.writer import AnswerWriter
from quire.server.generation.background import Running
from quire.server.generation.beam_search import BeamSearch
from quire.server.generation.choice import ChoiceDelta
from quire.server.generation.fold import Answer, fold
from quire.server.generation.generation import Generation
from quire.server.generation.sampling import Sampling
from quire.server.generation.spec import GenerationSpec
from quire.server.generation.vectors import Vectors, VectorSpec
from quire.server.routes.bodies import WEIGHTS_VERSION, here_of, of_caller, owner_of
from quire.server.runtime import Runtime, runtime_of, server_of
from quire.server.served_model import model_of
from quire.server.sse import CLIENT_CLOSED_REQUEST, EventStream, closing_on_disconnect
from quire.server.streams import BODY, KEEP_ALIVE, KEY, RESUMED, busy, keep_alive

Started = TypeVar("Started", Generation, Vectors)
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
    runtime = runtime_of(request)
    keep = keep_alive(request, 0 if server_of(request).streams is None else runtime.config.stream_grace)
    if keep and not (spec.stream and spec.resumable):
        raise InvalidRequest(f"{KEEP_ALIVE}: only for a stream that can be resumed", param=KEEP_ALIVE)
    generation, close = begin(request, spec)
    close = await journaled(request, spec, generation, close)
    if spec.stream:
        return _streamed(request, spec, writer, generation, close, ended, keep)
    with runtime.kept.call() as count:
        async with closing_on_disconnect(request.receive, close):
            answers = await _folded(request, spec, generation, count)
        if not generation.complete:
            if KEY in request.headers and not await request.is_disconnected():
                raise busy()  # which took it over
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        best = generation.best(answers)
        writer.weights_version = generation.weights_version
        if spec.receipt:
            writer.receipt = await runtime.receipts.told(spec, generation)
        if spec.logprobs or spec.prompt_logprobs is not None:
            body = await runtime.turns.in_thread(writer.whole, best, generation.usage)
        else:
            body = writer.whole(best, generation.usage)
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
    runtime, transport = runtime_of(request), request.scope.get(TRANSPORT)
    headers = {**spec.headers, WEIGHTS_VERSION: generation.weights_version}
    if spec.resumable:
        resumed, here = request.scope.get(RESUMED), here_of(request)
        by = () if resumed is None else computed_by(resumed, here)
        others = len(by) > 1  # also before this process: the reader may have tokens of any of them
        alters = others or not here.deterministic
        seen = () if resumed is None else resumed.seen
        writer = NumberedWriter(writer, spec, seen, (lambda: not generation.fresh) if alters else None)
        headers[STREAM_ID] = spec.id
        if others:
            headers[COMPUTED_BY] = ", ".join(by)
    if keep:
        transport = None
        events, close = _kept_alive(request, spec, writer, generation, close, ended, keep)
    else:
        events = events_of(generation, writer, spec, runtime, ended, transport)
    return EventStream(
        *(events, close, headers, runtime.config),
        media=writer.MEDIA,
        ping=writer.ping,
        failed=writer.failed,
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
    background, key = server_of(request).background, (owner_of(request), spec.id)
    held = hold_of(request.scope).moved()

    async def end() -> None:
        held.end()

    running = Running(writer, close, [])
    events = events_of(generation, writer, spec, runtime_of(request), ended)
    background.start(key, running, events, end)
    return running.follow(-1), partial(background.leave, key, running, seconds)


async def _folded(
    request: Request, spec: GenerationSpec, generation: Generation, count: Callable[[Sequence[ChoiceDelta]], None]
) -> list[Answer]:
    """The whole answers. A call that failed may be sent again with the same Idempotency-Key."""
    try:
        return await fold(generation.deltas(), count)
    except Exception:
        if KEY in request.headers and (streams := server_of(request).streams) is not None:
            await streams.forget(owner_of(request), spec.id)
        raise


async def journaled(
    request: Request, spec: GenerationSpec, generation: Generation, close: Callable[[], None]
) -> Callable[[], None]:
    """The function that ends the call. A call that can be asked for again is in the journal before its first event is
    sent."""
    streams = server_of(request).streams
    if streams is None or BODY not in request.scope or not (spec.resumable or KEY in request.headers):
        return close
    try:
        return await streams.begin(request, owner_of(request), spec, here_of(request), generation, close)
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
) -> tuple[Started, Admitted]:
    """Admit a call and `start` its work. Whoever ends the work settles the reservation.

    Raises what Admission.admit raises, and EngineError if the engine is gone.
    """
    reservation = admission_of(request).admit(
        tenant_of(request.scope),
        prompts=prompts,
        prompt_tokens=spec.prompt_tokens,
        n=n,
        max_tokens=max_tokens,
        priority=spec.priority,
    )
    name = model_of(request).names[0] if spec.adapter is None else spec.adapter.name
    runtime_of(request).request_log.begin(request.scope, spec.id, spec.answer_id, name)
    try:
        return start(), reservation
    except Exception:
        reservation.settle(0)
        raise


async def vectors_reply(request: Request, spec: VectorSpec) -> Response:
    """Raises what `admitted` raises, and EngineError, Timeout and QueueTimeout."""
    runtime, spec = runtime_of(request), of_caller(request, spec)
    start = partial(Vectors, spec, runtime.client, runtime.metrics)
    work, reservation = admitted(request, spec, start, prompts=len(spec.inputs))

    def close() -> None:
        work.close()
        reservation.settle(spec.prompt_tokens)

    async with closing_on_disconnect(request.receive, close):
        vectors = await work.gathered()
    if vectors is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    version = work.weights_version
    if sum(map(len, vectors)) > QUICK_NUMBERS:
        body = await runtime.turns.in_thread(spec.answer, spec, version, vectors)
    else:
        body = spec.answer(spec, version, vectors)
    return Response(body, 200, {**spec.headers, WEIGHTS_VERSION: version}, "application/json")


def start(spec: GenerationSpec, runtime: Runtime) -> Generation:
    """The generation that a spec asks for. Raises EngineError when the engine is gone."""
    common = spec, runtime.model.tokenizer, runtime.client, runtime.metrics, runtime.turns
    if spec.beam_search:
        return BeamSearch(*common, context_length=runtime.model.context_length)
    return Sampling(*common)


def begin(request: Request, spec: GenerationSpec) -> tuple[Generation, Callable[[], None]]:
    """Admit a call and start its generation. The caller must call the returned function when it is done. Raises what
    `admitted` raises."""
    runtime, params = runtime_of(request), spec.params
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
        reservation.settle(generation.usage.total_tokens)
        if not closed:
            closed = True
            runtime.receipts.ended(spec, generation)

    return generation, close


def _count_nothing(step: Sequence[ChoiceDelta]) -> None:
    pass


class Chunks:
    """Writes steps directly to a transport, as chunks of a body that has begun. It is kept small, because the memory
    that it touches costs more for each token than what it does."""

    __slots__ = ("_generation", "_transport", "_usage", "_writer")

    def __init__(self, generation: Generation, writer: AnswerWriter, transport: BurstTransport, *, usage: bool) -> None:
        """`usage`: tell it with each step."""
        self._generation = generation
        self._writer = writer
        self._transport = transport
        self._usage = usage

    def ready(self) -> bool:
        return self._transport.writable

    def take(self, step: list[ChoiceDelta]) -> None:
        writer, generation = self._writer, self._generation
        writer.weights_version = generation.weights_version
        if self._usage:
            writer.tell_usage(generation.usage)
        self._transport.write_chunk(writer.step(step))


async def events_of(
    generation: Generation,
    writer: AnswerWriter,
    spec: GenerationSpec,
    runtime: Runtime,
    ended: Callable[[], Awaitable[None]],
    transport: BurstTransport | None = None,
) -> AsyncGenerator[bytes]:
    """The events of a stream, one chunk for each step. If `transport` is given, steps that arrive while the stream
    waits are written to it directly, except the first and the last."""
    if spec.continuous_usage:
        writer.tell_usage(generation.usage)
    opening, first = writer.first(), True
    keeps = spec.logprobs and writer.keeps_logprobs
    with runtime.kept.call() if keeps else nullcontext(_count_nothing) as count:
        async for step in generation.deltas():
            count(step)
            writer.weights_version = generation.weights_version
            if spec.continuous_usage:
                writer.tell_usage(generation.usage)
            if spec.echo and spec.logprobs:  # all of the prompt's may come in one step
                yield opening + await runtime.turns.in_thread(writer.step, step)
            elif events := opening + writer.step(step):  # else the reader of a stream that goes on has seen them
                yield events
                if first and transport is not None and not keeps:
                    generation.shorten(Chunks(generation, writer, transport, usage=spec.continuous_usage))
                first = False
            opening = b""
        if generation.complete:
            writer.weights_version = generation.weights_version
            if spec.receipt:
                writer.receipt = await runtime.receipts.told(spec, generation)
            last = writer.last(generation.usage)
            await ended()
            if last:
                yield last
