"""POST /v1/decisions: OpenAI's Decisions API."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.access.admission import GenerationRoute
from quire.server.generation.answers.decisions import DecisionsWriter
from quire.server.generation.spec import GenerationSpec
from quire.server.protocol.questions.decisions import DecisionRequest
from quire.server.resolve.translated.decisions import resolve_decisions
from quire.server.routes.bodies import documented, resolved_spec
from quire.server.routes.reply import reply
from quire.server.runtime import runtime_of
from quire.server.served_model import model_of

router = APIRouter(route_class=GenerationRoute)


@router.post("/v1/decisions", response_model=None, openapi_extra=documented(DecisionRequest))
async def create_decision(request: Request) -> Response:
    """Answer questions about an input by the probabilities of their options; no text is generated."""
    model = model_of(request)
    spec = await resolved_spec(request, resolve_decisions)
    count_questions(request, spec)
    return await reply(request, spec, DecisionsWriter(spec, model.tokenizer, model.fingerprint))


def count_questions(request: Request, spec: GenerationSpec) -> None:
    counters = runtime_of(request).metrics.questions
    for question in spec.questions:
        counters[question.type].inc()
