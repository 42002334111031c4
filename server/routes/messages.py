"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.access.admission import CountedRoute, GenerationRoute
from quire.server.generation.answers.messages import MessagesWriter
from quire.server.protocol.messages import CountTokensRequest, MessagesRequest
from quire.server.resolve.translated.messages import count_tokens, resolve_message
from quire.server.routes.bodies import documented, resolved_spec, worked_on
from quire.server.routes.reply import reply
from quire.server.served_model import model_of

router = APIRouter(route_class=GenerationRoute)
counting = APIRouter(route_class=CountedRoute)


@router.post("/v1/messages", response_model=None, openapi_extra=documented(MessagesRequest))
async def create_message(request: Request) -> Response:
    """Answer a conversation."""
    model = model_of(request)
    spec = await resolved_spec(request, resolve_message)
    return await reply(request, spec, MessagesWriter(spec, model.tokenizer, model.fingerprint))


@counting.post("/v1/messages/count_tokens", response_model=None, openapi_extra=documented(CountTokensRequest))
async def count_message_tokens(request: Request) -> Response:
    """The number of tokens that a conversation has as a prompt."""
    counted = await worked_on(request, count_tokens)
    return Response(counted.body, 200, counted.headers, "application/json")


router.include_router(counting)
