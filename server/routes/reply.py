"""A generation's way out: streamed or whole, one path."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from server.admission import admit
from server.beam import BeamSearch
from server.choice import ChoiceDelta, Job
from server.doors import tenant_of
from server.generate import Answer, Generation, Usage, fold
from server.serving import Serving
from server.sse import EventStream, closing_on_disconnect

CLIENT_CLOSED_REQUEST = 499


class Writer(Protocol):
    """Turns deltas into the bytes of an endpoint's answer."""

    def tell_usage(self, usage: Usage) -> None: ...

    def first(self, num_choices: int) -> bytes: ...

    def step(self, deltas: Sequence[ChoiceDelta]) -> bytes: ...

    def last(self, usage: Usage) -> bytes: ...

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes: ...


async def reply(
    request: Request,
    serving: Serving,
    job: Job,
    writer: Writer,
    *,
    stream: bool,
    headers: Mapping[str, str],
    continuous_usage: bool = False,
) -> Response:
    """Submit the job and answer it.

    Raises what `admit` raises, EngineError when the engine is gone or failed a whole answer.
    """
    tenant = tenant_of(request.scope)
    tenant.check_priority(job.priority)
    salt = job.cache_salt if serving.config.share_prefix_cache else tenant.salt(job.cache_salt)
    job = replace(job, cache_salt=salt, tenant=tenant.name, weight=tenant.weight)
    reservation = admit(serving, tenant, job.prompts, job.params.n, job.params.max_tokens)
    serving.ledger.begin(request.scope, job.id, serving.config.model_names[0])
    generation: Generation | BeamSearch
    try:
        if job.length_penalty is None:
            generation = Generation(job, serving.client, serving.tokenizer, serving.metrics)
        else:
            room = serving.info.max_model_len
            generation = BeamSearch(job, job.length_penalty, serving.client, serving.tokenizer, serving.metrics, room)
    except Exception:
        reservation.settle(0)
        raise

    def close() -> None:
        generation.close()
        reservation.settle(generation.usage.prompt_tokens + generation.usage.completion_tokens)

    if stream:
        return EventStream(_events(generation, writer, continuous_usage), close, headers)
    async with closing_on_disconnect(request.receive, close):
        answers = await fold(generation.deltas())
    if not generation.complete:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return Response(writer.whole(generation.best(answers), generation.usage), 200, dict(headers), "application/json")


async def _events(generation: Generation | BeamSearch, writer: Writer, continuous_usage: bool) -> AsyncIterator[bytes]:
    if continuous_usage:
        writer.tell_usage(generation.usage)
    opening = writer.first(generation.num_choices)
    async for step in generation.deltas():
        if continuous_usage:
            writer.tell_usage(generation.usage)
        yield opening + writer.step(step)
        opening = b""
    if generation.complete:
        yield writer.last(generation.usage)
