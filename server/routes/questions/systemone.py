"""POST /v1/systemone: TypeSafe's System One API."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.access.admission import GenerationRoute
from quire.server.errors import SYSTEM_ONE
from quire.server.generation.answers.systemone import SystemOneWriter
from quire.server.protocol.questions.systemone import SystemOneRequest
from quire.server.resolve.translated.systemone import resolve_systemone
from quire.server.routes.bodies import documented, resolved_spec
from quire.server.routes.questions.decisions import count_questions
from quire.server.routes.reply import reply
from quire.server.served_model import model_of

router = APIRouter(route_class=GenerationRoute)


@router.post(SYSTEM_ONE, response_model=None, openapi_extra=documented(SystemOneRequest))
async def evaluate(request: Request) -> Response:
    """Answer questions about a state by the probabilities of their options; no text is generated."""
    model = model_of(request)
    spec = await resolved_spec(request, resolve_systemone)
    count_questions(request, spec)
    return await reply(request, spec, SystemOneWriter(spec, model.tokenizer, model.fingerprint))
