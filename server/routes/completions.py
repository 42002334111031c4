"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.access.admission import GenerationRoute
from quire.server.generation.answers.completion import CompletionWriter
from quire.server.protocol.completions import CompletionRequest
from quire.server.resolve.completions import resolve_completion
from quire.server.routes.bodies import documented, resolved_spec
from quire.server.routes.reply import reply
from quire.server.served_model import model_of

router = APIRouter(route_class=GenerationRoute)


@router.post("/v1/completions", response_model=None, openapi_extra=documented(CompletionRequest))
async def create_completion(request: Request) -> Response:
    """Continue a prompt, or each of several."""
    model = model_of(request)
    spec = await resolved_spec(request, resolve_completion)
    return await reply(request, spec, CompletionWriter(spec, model.tokenizer, model.fingerprint))
