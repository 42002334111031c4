"""POST /v1/sessions/{id}/warm: announces that a paused conversation is about to go on."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.common.errors import RequestNotFound
from quire.server.access.admission import GenerationRoute
from quire.server.access.authentication import tenant_of
from quire.server.protocol.stored_objects import WarmRequest
from quire.server.resolve.sessions import parse_warm_request, resolve_warm_request
from quire.server.routes.bodies import Documented, checked, worked_on
from quire.server.routes.reply import reply
from quire.server.runtime.model_runtime import get_runtime
from quire.server.served_model import get_model

router = APIRouter(route_class=GenerationRoute)


@router.post(
    "/v1/sessions/{session_id:path}/warm",
    response_model=None,
    openapi_extra=Documented(WarmRequest),
    responses={404: {"description": "No conversation with that session_id has ended here lately."}},
)
async def warm(session_id: str, request: Request) -> Response:
    """Bring a conversation into the KV cache, from a lower tier or by computing it again, so that its next turn starts
    at once.

    The conversation consists of the requests with this `session_id`, the same key and the same cache_salt. The answer
    comes when the conversation is in the cache; a caller need not wait for it. The call is charged as a prompt of that
    length with an answer of one token.
    """
    body, headers = await worked_on(request, parse_warm_request)
    runtime, model = get_runtime(request), get_model(request)
    tenant = tenant_of(request.scope)
    turn = await runtime.cross_process_observer.find_last_turn(
        tenant.name, tenant.prefix_cache_salt(body.cache_salt), session_id
    )
    if turn is None:
        message = f"No conversation with the session_id `{session_id}` is known here, or not any more"
        message += "; those with images are not remembered"
        raise RequestNotFound(message, param="session_id")
    call = resolve_warm_request(session_id, turn, body, model, runtime.config)
    spec = replace(await checked(request, call), headers=headers)
    return await reply(request, spec, call.writer(spec, model.tokenizer, model.fingerprint))
