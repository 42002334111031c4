"""POST /v1/embeddings, /pooling, /classify, /v1/score and /v1/rerank, with their other paths."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.access.admission import GenerationRoute
from quire.server.protocol.pooling import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from quire.server.resolve.pairs import resolve_cohere_rerank, resolve_rerank, resolve_score
from quire.server.resolve.pooling import resolve_classification, resolve_embedding, resolve_pooling
from quire.server.routes.bodies import documented
from quire.server.routes.vectors.reply import answered

router = APIRouter(route_class=GenerationRoute)


@router.post("/v1/embeddings", response_model=None, openapi_extra=documented(EmbeddingRequest))
async def create_embeddings(request: Request) -> Response:
    """A vector of each input."""
    return await answered(request, resolve_embedding)


@router.post("/pooling", response_model=None, openapi_extra=documented(PoolingRequest))
async def pool(request: Request) -> Response:
    """What the model makes of each input: an embedding, or the scores of its labels."""
    return await answered(request, resolve_pooling)


@router.post("/classify", response_model=None, openapi_extra=documented(ClassificationRequest))
async def classify(request: Request) -> Response:
    """The label of each input, and the probabilities of all labels."""
    return await answered(request, resolve_classification)


@router.post("/v1/score", response_model=None, openapi_extra=documented(ScoreRequest))
@router.post("/score", response_model=None, openapi_extra=documented(ScoreRequest), include_in_schema=False)
async def score(request: Request) -> Response:
    """How well texts fit each other, pair by pair."""
    return await answered(request, resolve_score)


@router.post("/v1/rerank", response_model=None, openapi_extra=documented(RerankRequest))
@router.post("/rerank", response_model=None, openapi_extra=documented(RerankRequest), include_in_schema=False)
async def rerank(request: Request) -> Response:
    """Documents by how well they fit a query, as Jina's API has it."""
    return await answered(request, resolve_rerank)


@router.post("/v2/rerank", response_model=None, openapi_extra=documented(RerankRequest))
async def cohere_rerank(request: Request) -> Response:
    """The same as Cohere's API has it."""
    return await answered(request, resolve_cohere_rerank)
