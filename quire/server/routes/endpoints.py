from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.pipeline.answer import Resolution, answer
from quire.server.pipeline.resolve import Resolver
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.completions import CompletionRequest
from quire.server.protocol.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from quire.server.resolve.invocations import resolve_invocation
from quire.server.routes.api_description import BodySchema
from quire.server.routes.endpoint_tables.endpoint import Endpoint
from quire.server.routes.endpoint_tables.generation_endpoints import GENERATION_ENDPOINTS
from quire.server.routes.endpoint_tables.llama_cpp_endpoints import LLAMA_CPP_ENDPOINTS
from quire.server.routes.endpoint_tables.ollama_endpoints import OLLAMA_ENDPOINTS
from quire.server.routes.endpoint_tables.token_endpoints import TOKEN_ENDPOINTS
from quire.server.routes.endpoint_tables.vector_endpoints import VECTOR_ENDPOINTS

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
    *LLAMA_CPP_ENDPOINTS,
    *TOKEN_ENDPOINTS,
)


def make_handler(resolve: Resolver[Resolution]) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def handle_request(request: Request) -> Response:
        return await answer(request, resolve)

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
        openapi_extra=BodySchema(*each.body_models),
        include_in_schema=each.in_schema,
        route_class_override=each.route_class,
    )
