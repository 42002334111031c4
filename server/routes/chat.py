"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.access.admission import GenerationRoute
from quire.server.access.authentication import tenant_of
from quire.server.generation.answers.chat import ChatWriter
from quire.server.protocol.chat import ChatRequest
from quire.server.resolve.chat import chat_spec
from quire.server.routes.reply import reply
from quire.server.runtime import runtime_of
from quire.server.served_model import model_of

router = APIRouter(route_class=GenerationRoute)


@router.post("/v1/chat/completions", response_model=None)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    model = model_of(request)
    spec = await chat_spec(body, model, tenant_of(request.scope), runtime_of(request).config)
    return await reply(request, spec, ChatWriter(spec, model.tokenizer, model.fingerprint))
