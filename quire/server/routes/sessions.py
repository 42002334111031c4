from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.common.errors import RequestNotFound
from quire.server.access.admission import GenerationRoute
from quire.server.access.authentication import tenant_of
from quire.server.pipeline.answer import answer_with_text
from quire.server.pipeline.authorize import open_durable_request
from quire.server.pipeline.resolve import resolve_body
from quire.server.protocol.stored_objects import WarmRequest
from quire.server.resolve.sessions import parse_warm_request, resolve_warm_request
from quire.server.routes.api_description import BodySchema
from quire.server.runtime.server_context import get_runtime
from quire.server.served_model import get_model

router = APIRouter(route_class=GenerationRoute)


@router.post(
    "/v1/sessions/{session_id:path}/warm",
    response_model=None,
    openapi_extra=BodySchema(WarmRequest),
    responses={404: {"description": "No conversation with that session_id has ended here lately."}},
)
async def warm(session_id: str, request: Request) -> Response:
    """Bring a conversation into the KV cache, from a lower tier or by recomputing it, so that its next turn starts at
    once.

    The conversation consists of the requests with this `session_id`, the same API key and the same cache_salt. The
    answer comes when the conversation is cached; callers need not wait for it. Charged as a prompt of that length with
    one output token.
    """
    body = await resolve_body(request, parse_warm_request)
    runtime = get_runtime(request)
    tenant = tenant_of(request.scope)
    turn = await runtime.cross_process_observer.find_last_turn(
        tenant.name, tenant.prefix_cache_salt(body.cache_salt), session_id
    )
    if turn is None:
        message = f"No conversation with the session_id `{session_id}` is known here; it may have expired"
        message += "; those with images are not remembered"
        raise RequestNotFound(message, param="session_id")
    resolution = resolve_warm_request(session_id, turn, body, get_model(request), runtime.config)
    return await answer_with_text(request, resolution, open_durable_request(request))
