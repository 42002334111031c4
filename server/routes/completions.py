"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.access.admission import GenerationRoute
from quire.server.access.authentication import tenant_of
from quire.server.generation.answers.completion import CompletionWriter
from quire.server.protocol.completions import CompletionRequest
from quire.server.resolve.completions import completion_spec
from quire.server.routes.reply import reply
from quire.server.runtime import runtime_of
from quire.server.served_model import model_of

router = APIRouter(route_class=GenerationRoute)


@router.post("/v1/completions", response_model=None)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue a prompt, or each of several."""
    model = model_of(request)
    spec = await completion_spec(body, model, tenant_of(request.scope), runtime_of(request).config)
    return await reply(request, spec, CompletionWriter(spec, model.tokenizer, model.fingerprint))
