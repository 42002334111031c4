"""The endpoints whose answer follows from the body of a POST alone. Each is a row of a table."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.generation.vector_generation import VectorSpec
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.completions import CompletionRequest
from quire.server.protocol.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from quire.server.resolve.invocations import resolve_invocation
from quire.server.resolve.tokenize_requests import JsonReply
from quire.server.routes.bodies import Documented, Work, checked, worked_on
from quire.server.routes.endpoint_tables.endpoint import Endpoint, Resolution
from quire.server.routes.endpoint_tables.generation_endpoints import GENERATION_ENDPOINTS
from quire.server.routes.endpoint_tables.ollama_endpoints import OLLAMA_ENDPOINTS
from quire.server.routes.endpoint_tables.token_endpoints import TOKEN_ENDPOINTS
from quire.server.routes.endpoint_tables.vector_endpoints import VECTOR_ENDPOINTS
from quire.server.routes.reply import reply, vectors_reply
from quire.server.runtime.model_runtime import get_runtime
from quire.server.served_model import get_model

ENDPOINTS = (
    *GENERATION_ENDPOINTS,
    *VECTOR_ENDPOINTS,
    Endpoint(
        "/invocations",
        "invoke",
        "A body with messages is /v1/chat/completions', one with a prompt /v1/completions', with an input "
        "/v1/embeddings'\n(or /classify's), with a query /v1/rerank's, with text_1 /v1/score's.",
        resolve_invocation,
        (ChatRequest, CompletionRequest, EmbeddingRequest, RerankRequest, ScoreRequest),
    ),
    *OLLAMA_ENDPOINTS,
    *TOKEN_ENDPOINTS,
)


def make_handler(resolve: Work[Resolution]) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """The function that answers the requests of an endpoint. It raises what `worked_on`, `checked` and the replies
    raise."""

    async def handle_request(request: Request) -> Response:
        model = get_model(request)
        resolved = await worked_on(request, resolve)
        if isinstance(resolved, JsonReply):
            return Response(resolved.body, 200, resolved.headers, "application/json")
        if isinstance(resolved, VectorSpec):
            return await vectors_reply(request, resolved)
        spec = await checked(request, resolved)
        get_runtime(request).metrics.count_questions_by_type(question.type for question in spec.questions)
        return await reply(request, spec, resolved.writer(spec, model.tokenizer, model.fingerprint))

    return handle_request


router = APIRouter()
for each in ENDPOINTS:
    router.add_api_route(
        each.path,
        make_handler(each.resolve),
        methods=["POST"],
        name=each.name,
        description=each.description,
        response_model=None,
        openapi_extra=Documented(*each.body_models),
        include_in_schema=each.in_schema,
        route_class_override=each.route_class,
    )
