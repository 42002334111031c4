"""/v1/requests/{id}: cancel a request from another connection; explain where its time went."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.errors import RequestNotFound
from quire.server.access.authentication import tenant_of
from quire.server.observe.other_processes import explained
from quire.server.runtime import server_of

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
    """Of an open request or one of the last: time per phase, prompt chunks, batches it was in, preemptions, replays.

    By the answer's id or by X-Request-Id. With API keys, only of requests made with the same key, or with an admin key.
    """
    for runtime in list(server_of(request).models.loaded):
        async with runtime.turns:
            found = explained(name, request.scope, runtime.request_log, runtime.client.history)
        found = found or await runtime.others.explanation(name, tenant_of(request.scope))
        if found is not None:
            return Response(found, media_type="application/json")
    raise RequestNotFound(f"No request `{name}` is known here, or not any more", param="id")
