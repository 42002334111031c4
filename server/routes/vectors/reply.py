"""From a body to the answer of a call for vectors: resolve it, admit it, let the engine compute, write."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from quire.server.access.admission import admission_of
from quire.server.access.authentication import tenant_of
from quire.server.config import ServerConfig
from quire.server.generation.vectors import Head, Vectors, VectorSpec
from quire.server.routes.bodies import (
    CLIENT_CLOSED_REQUEST,
    WEIGHTS_VERSION,
    chosen_adapter,
    chosen_name,
    worked_on,
)
from quire.server.runtime import runtime_of, server_of
from quire.server.served_model import ServedModel, model_of
from quire.server.sse import closing_on_disconnect

QUICK_NUMBERS = 2**14
"""Of an answer; JSON of so many takes a few milliseconds, of more a thread makes it."""
Resolve = Callable[[bytes, ServedModel, ServerConfig], VectorSpec]


async def answered(request: Request, resolve: Resolve) -> Response:
    """Raises what `worked_on` and `vectors_reply` raise."""
    return await vectors_reply(request, await worked_on(request, resolve))


async def vectors_reply(request: Request, spec: VectorSpec) -> Response:
    """Raises what Admission.admit raises, and EngineError, Timeout and QueueTimeout."""
    model, runtime, tenant = model_of(request), runtime_of(request), tenant_of(request.scope)
    urgency = server_of(request).gateways.priority(request.scope)
    spec = replace(
        spec,
        priority=spec.priority if urgency is None else urgency,
        adapter=chosen_adapter(request, spec.model),
        name=spec.name or chosen_name(request, f"{spec.id.partition('-')[0]}-"),
        tenant=tenant.name,
        weight=tenant.weight,
        cache_salt=tenant.salt(spec.cache_salt),
    )
    reservation = admission_of(request).admit(
        tenant,
        prompts=len(spec.inputs),
        prompt_tokens=spec.prompt_tokens,
        n=1,
        max_tokens=None,
        priority=spec.priority,
    )
    runtime.request_log.begin(request.scope, spec.id, spec.answer_id, model.names[0])
    try:
        work = Vectors(spec, runtime.client, runtime.metrics)
    except Exception:
        reservation.settle(0)
        raise

    def close() -> None:
        work.close()
        reservation.settle(spec.prompt_tokens)

    async with closing_on_disconnect(request.receive, close):
        vectors = await work.gathered()
    if vectors is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    version = work.weights_version
    about = Head(spec.answer_id, spec.model, int(time.time()), version)
    if sum(map(len, vectors)) > QUICK_NUMBERS:
        body = await runtime.turns.in_thread(spec.answer.body, about, vectors, spec.prompt_tokens)
    else:
        body = spec.answer.body(about, vectors, spec.prompt_tokens)
    return Response(body, 200, {**spec.headers, WEIGHTS_VERSION: version}, "application/json")
