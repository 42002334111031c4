"""/v1/requests/{id}: cancel a request from another connection; explain where its time went."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.common.errors import RequestNotFound
from quire.server.access.authentication import tenant_of
from quire.server.access.tenants import Tenant
from quire.server.runtime.model_runtime import ModelRuntime
from quire.server.runtime.server_context import get_server_context

router = APIRouter()


@router.delete(
    "/v1/requests/{request_id:path}",
    responses={404: {"description": "No open request has that id: it has ended, or never was."}},
)
async def cancel_request(request_id: str, request: Request) -> dict[str, Any]:
    """Cancel an open request. Its caller gets what has been generated so far, with finish_reason "abort".

    The id is the answer's (chatcmpl-…, cmpl-…), for all its choices, or one choice's (chatcmpl-…-0), as explain lists
    them. If callers chose the same id for several answers, all of them are cancelled. Requests of another key can only
    be cancelled with an admin's API key.
    """
    tenant, cancelled = tenant_of(request.scope), 0
    owner = None if tenant.admin else tenant.name
    for runtime in list(get_server_context(request).models.loaded_runtimes):
        cancelled += runtime.client.cancel(
            request_id, owner
        ) + await runtime.cross_process_observer.cancel_requests_of_peers(request_id, owner)
    if not cancelled:
        raise RequestNotFound(f"No open request has the id `{request_id}`", param="request_id")
    return {"id": request_id, "object": "request", "cancelled": True, "sequences": cancelled}


@router.get("/v1/requests/{name:path}/explain", response_model=None)
async def explain(name: str, request: Request) -> Response:
    """Where the time of an open or recent request went: time per phase, prompt chunks, the batches it was in,
    preemptions, replays; and how much of its prompt was in the prefix cache, how much could have been, and why it was
    not. The request is named by the answer's id or by X-Request-Id. With API keys, only for requests of the same key,
    or with an admin's key."""
    explanation, _ = await _find_explanation(name, tenant_of(request.scope), request)
    return Response(explanation, media_type="application/json")


@router.get("/v1/requests/{name:path}/conversation", name="conversation", response_model=None)
async def list_conversation_turns(name: str, request: Request) -> dict[str, Any]:
    """The turns of the conversation that a request belongs to, as far as they are remembered (--request-history): for
    each prompt, the numbers of tokens that were cached, that could have been cached, and that were new. Prompts belong
    to one conversation if one begins with the other, or with most of it."""
    explanation, runtime = await _find_explanation(name, tenant := tenant_of(request.scope), request)
    prefixes = [each["prefix"] for each in msgspec.json.decode(explanation)["sequences"] if each["prefix"] is not None]
    conversation_names = list(dict.fromkeys(each["conversation"] for each in prefixes))
    turns = (
        await runtime.cross_process_observer.collect_conversation_turns(conversation_names[0], tenant)
        if conversation_names
        else []
    )
    return {"object": "list", "conversation": conversation_names[0] if conversation_names else None, "data": turns}


async def _find_explanation(name: str, tenant: Tenant, request: Request) -> tuple[bytes, ModelRuntime]:
    """The explanation of a request, and what runs beside its model."""
    for runtime in list(get_server_context(request).models.loaded_runtimes):
        async with runtime.loop_work_pacer:
            explanation = runtime.cross_process_observer.explain_own_request(name, tenant.name, tenant.admin)
        explanation = explanation or await runtime.cross_process_observer.explain_peer_request(name, tenant)
        if explanation is not None:
            return explanation, runtime
    raise RequestNotFound(f"No request `{name}` is known here, or not any more", param="id")
