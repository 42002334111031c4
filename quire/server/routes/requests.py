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
    """Cancel an open request. Its caller gets the text generated so far, with finish_reason "abort". `request_id` is
    the answer's id (chatcmpl-…, cmpl-…) for all its choices, or one choice's (chatcmpl-…-0), as explain lists them. If
    callers chose an id several times, all its answers are cancelled. Other keys' requests need an admin's key.
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
    """How an open or recent request spent its time: phases, prompt chunks, batches, preemptions, replays. Also how much
    of its prompt was in the prefix cache, how much more could have been, and why it was not. `name` is the answer's id
    or X-Request-Id. With API keys, only the request's own key or an admin's may ask.
    """
    explanation, _ = await _find_explanation(name, tenant_of(request.scope), request)
    return Response(explanation, media_type="application/json")


@router.get("/v1/requests/{name:path}/conversation", name="conversation", response_model=None)
async def list_conversation_turns(name: str, request: Request) -> dict[str, Any]:
    """The remembered turns (--request-history) of a request's conversation: for each prompt, the tokens that were
    cached, could have been cached, and were new. Prompts belong together if one begins with the other, or with most of
    it.
    """
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
    for runtime in list(get_server_context(request).models.loaded_runtimes):
        async with runtime.loop_work_pacer:
            explanation = runtime.cross_process_observer.explain_own_request(name, tenant.name, tenant.admin)
        explanation = explanation or await runtime.cross_process_observer.explain_peer_request(name, tenant)
        if explanation is not None:
            return explanation, runtime
    raise RequestNotFound(f"No request `{name}` is known here; it may have expired", param="id")
