"""/v1/requests/{id}: cancel a request from another connection; explain where its time went."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.errors import RequestNotFound
from quire.server.access.authentication import tenant_of
from quire.server.runtime import Runtime, server_of

router = APIRouter()


@router.delete(
    "/v1/requests/{request_id:path}",
    responses={404: {"description": "No open request has that id: it has ended, or never was."}},
)
async def cancel_request(request_id: str, request: Request) -> dict[str, Any]:
    """Cancel an open request. Its own caller gets what there is so far, with finish_reason "abort".

    The id is the answer's (chatcmpl-…, cmpl-…), for all its choices, or one choice's, which explain tells
    (chatcmpl-…-0). Of an id that callers chose for several answers all are cancelled.
    Only an admin's API key cancels what came with another key.
    """
    tenant, cancelled = tenant_of(request.scope), 0
    owner = None if tenant.admin else tenant.name
    for runtime in list(server_of(request).models.loaded):
        cancelled += runtime.client.cancel(request_id, owner) + await runtime.others.cancel(request_id, owner)
    if not cancelled:
        raise RequestNotFound(f"No open request has the id `{request_id}`", param="request_id")
    return {"id": request_id, "object": "request", "cancelled": True, "sequences": cancelled}


@router.get("/v1/requests/{name:path}/explain", response_model=None)
async def explain(name: str, request: Request) -> Response:
    """Of an open request or one of the last: time per phase, prompt chunks, batches it was in, preemptions, replays;
    what of its prompt the prefix cache had, could have had, and why it had not.

    By the answer's id or by X-Request-Id. With API keys, only of requests made with the same key, or with an admin key.
    """
    found, _ = await _explained(name, request)
    return Response(found, media_type="application/json")


@router.get("/v1/requests/{name:path}/conversation", response_model=None)
async def conversation(name: str, request: Request) -> dict[str, Any]:
    """The turns of the conversation that a request belongs to, as far as they are remembered (--request-history): of
    each prompt the tokens that were cached, that could have been, and that were new. Prompts belong together where one
    begins with the other, or has most of it."""
    found, runtime = await _explained(name, request)
    prefixes = [each["prefix"] for each in msgspec.json.decode(found)["sequences"] if each["prefix"] is not None]
    names = list(dict.fromkeys(each["conversation"] for each in prefixes))
    turns = await runtime.others.turns(names[0], request.scope) if names else []
    return {"object": "list", "conversation": names[0] if names else None, "data": turns}


async def _explained(name: str, request: Request) -> tuple[bytes, Runtime]:
    """The explanation of a request, and what runs beside its model."""
    for runtime in list(server_of(request).models.loaded):
        async with runtime.turns:
            found = runtime.others.explained(name, request.scope)
        found = found or await runtime.others.explanation(name, tenant_of(request.scope))
        if found is not None:
            return found, runtime
    raise RequestNotFound(f"No request `{name}` is known here, or not any more", param="id")
