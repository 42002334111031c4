"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.access.admission import GenerationRoute
from quire.server.generation.answers.chat import ChatWriter
from quire.server.protocol.chat import ChatRequest
from quire.server.resolve.chat import resolve_chat
from quire.server.routes.bodies import documented, resolved_spec
from quire.server.routes.reply import reply
from quire.server.served_model import model_of

router = APIRouter(route_class=GenerationRoute)


@router.post("/v1/chat/completions", response_model=None, openapi_extra=documented(ChatRequest))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    model = model_of(request)
    spec = await resolved_spec(request, resolve_chat)
    return await reply(request, spec, ChatWriter(spec, model.tokenizer, model.fingerprint))
