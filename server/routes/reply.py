"""From a spec to the response: admit it, generate, and answer streamed or whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from quire.server.access.admission import admission_of
from quire.server.access.authentication import tenant_of
from quire.server.generation.answers.writer import AnswerWriter
from quire.server.generation.fold import fold
from quire.server.generation.generation import Generation
from quire.server.generation.spec import GenerationSpec
from quire.server.generation.start import start
from quire.server.runtime import runtime_of
from quire.server.served_model import model_of
from quire.server.sse import EventStream, closing_on_disconnect

CLIENT_CLOSED_REQUEST = 499


async def reply(request: Request, spec: GenerationSpec, writer: AnswerWriter) -> Response:
    """Raises what Admission.admit raises, and EngineError when the engine is gone or failed a whole answer."""
    model, runtime = model_of(request), runtime_of(request)
    reservation = admission_of(request).admit(
        tenant_of(request.scope),
        prompts=len(spec.prompts),
        prompt_tokens=spec.prompt_tokens,
        n=spec.params.n,
        max_tokens=spec.params.max_tokens,
        priority=spec.priority,
    )
    runtime.request_log.begin(request.scope, spec.id, model.names[0])
    try:
        generation = start(spec, model, runtime.client, runtime.metrics)
    except Exception:
        reservation.settle(0)
        raise

    def close() -> None:
        generation.close()
        reservation.settle(generation.usage.total_tokens)

    if spec.stream:
        return EventStream(_events(generation, writer, spec), close, spec.headers, runtime.config)
    async with closing_on_disconnect(request.receive, close):
        answers = await fold(generation.deltas())
    if not generation.complete:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    body = writer.whole(generation.best(answers), generation.usage)
    return Response(body, 200, dict(spec.headers), "application/json")


async def _events(generation: Generation, writer: AnswerWriter, spec: GenerationSpec) -> AsyncGenerator[bytes]:
    if spec.continuous_usage:
        writer.tell_usage(generation.usage)
    opening = writer.first()
    async for step in generation.deltas():
        if spec.continuous_usage:
            writer.tell_usage(generation.usage)
        yield opening + writer.step(step)
        opening = b""
    if generation.complete:
        yield writer.last(generation.usage)
