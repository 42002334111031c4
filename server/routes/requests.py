"""/v1/requests/{id}: end a request from another connection, and say where its time went."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from engine.errors import RequestNotFound
from server.doors import tenant_of
from server.explain import explanation
from server.serving import serving_of

router = APIRouter()


@router.delete(
    "/v1/requests/{request_id}",
    responses={404: {"description": "No open request has that id: it has ended, or never was."}},
)
async def cancel_request(request_id: str, request: Request) -> dict[str, Any]:
    """Cancel an open request. Its own caller gets what there is so far, with finish_reason "abort".

    The id is the answer's (chatcmpl-…, cmpl-…), for all its choices, or one choice's (chatcmpl-…-0).
    Only an admin's API key cancels what came with another key.
    """
    tenant = tenant_of(request.scope)
    cancelled = serving_of(request).client.cancel(request_id, None if tenant.admin else tenant.name)
    if not cancelled:
        raise RequestNotFound(f"No open request has the id `{request_id}`", param="request_id")
    return {"id": request_id, "object": "request", "cancelled": True, "sequences": cancelled}


@router.get("/v1/requests/{name:path}/explain")
async def explain(name: str, request: Request) -> dict[str, Any]:
    """Of an open request or one of the last: time per phase, prompt chunks, batches it was in, preemptions, replays.

    By the answer's id or by X-Request-Id. With API keys, only of requests made with the same key, or with an admin key.
    """
    serving = serving_of(request)
    trail = serving.ledger.find(name, request.scope)
    if trail is None:
        raise RequestNotFound(f"No request `{name}` is known here, or not any more", param="id")
    return explanation(trail, serving.client.history, lambda name: serving.ledger.may_name(name, request.scope))
