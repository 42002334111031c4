"""A generation's way out: streamed or whole, one path."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from quire.server.access.admission import admit
from quire.server.access.authentication import tenant_of
from quire.server.generation.answers.writer import AnswerWriter
from quire.server.generation.beam_search import BeamSearch
from quire.server.generation.choice import Job
from quire.server.generation.generate import Generation, fold
from quire.server.served_model import Serving
from quire.server.sse import EventStream, closing_on_disconnect

CLIENT_CLOSED_REQUEST = 499


async def reply(
    request: Request, serving: Serving, job: Job, writer: AnswerWriter, headers: Mapping[str, str]
) -> Response:
    """Submit the job and answer it.

    Raises what `admit` raises, EngineError when the engine is gone or failed a whole answer.
    """
    tenant, body = tenant_of(request.scope), job.body
    tenant.check_priority(body.priority)
    salt = body.cache_salt if serving.config.share_prefix_cache else tenant.salt(body.cache_salt)
    job = replace(job, cache_salt=salt, tenant=tenant.name, weight=tenant.weight)
    reservation = admit(serving, tenant, job.prompts, job.params.n, job.params.max_tokens)
    serving.request_log.begin(request.scope, job.id, serving.config.model_names[0])
    generation: Generation | BeamSearch
    try:
        generation = BeamSearch(job, serving) if body.use_beam_search else Generation(job, serving)
    except Exception:
        reservation.settle(0)
        raise

    def close() -> None:
        generation.close()
        reservation.settle(generation.usage.prompt_tokens + generation.usage.completion_tokens)

    if body.stream:
        return EventStream(_events(generation, writer, job), close, headers, serving.config)
    async with closing_on_disconnect(request.receive, close):
        answers = await fold(generation.deltas())
    if not generation.complete:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return Response(writer.whole(generation.best(answers), generation.usage), 200, dict(headers), "application/json")


async def _events(generation: Generation | BeamSearch, writer: AnswerWriter, job: Job) -> AsyncIterator[bytes]:
    if job.body.continuous_usage:
        writer.tell_usage(generation.usage)
    opening = writer.first(job.num_choices)
    async for step in generation.deltas():
        if job.body.continuous_usage:
            writer.tell_usage(generation.usage)
        yield opening + writer.step(step)
        opening = b""
    if generation.complete:
        yield writer.last(generation.usage)
