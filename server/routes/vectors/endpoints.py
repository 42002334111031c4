"""POST /v1/embeddings, /v2/embed, /pooling, /classify, /v1/score and /v1/rerank, with their other paths."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.access.admission import GenerationRoute
from quire.server.generation.answers.decisions import LabelScoresWriter
from quire.server.generation.vectors import VectorSpec
from quire.server.protocol.pooling import (
    ClassificationRequest,
    CohereEmbedRequest,
    ConversationEmbeddingRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from quire.server.protocol.questions.label_scores import LabelScoreRequest
from quire.server.resolve.pairs import resolve_cohere_rerank, resolve_rerank
from quire.server.resolve.pooling import resolve_classification, resolve_embedding, resolve_pooling
from quire.server.resolve.translated.cohere_embed import resolve_cohere_embedding
from quire.server.resolve.translated.label_scores import resolve_scores
from quire.server.routes.bodies import checked, documented, worked_on
from quire.server.routes.reply import reply
from quire.server.routes.vectors.reply import answered, vectors_reply
from quire.server.served_model import model_of

router = APIRouter(route_class=GenerationRoute)


@router.post(
    "/v1/embeddings", response_model=None, openapi_extra=documented(EmbeddingRequest, ConversationEmbeddingRequest)
)
async def create_embeddings(request: Request) -> Response:
    """A vector of each input, or of a conversation, which may show images."""
    return await answered(request, resolve_embedding)


@router.post("/pooling", response_model=None, openapi_extra=documented(PoolingRequest))
async def pool(request: Request) -> Response:
    """What the model makes of each input: an embedding, or the scores of its labels."""
    return await answered(request, resolve_pooling)


@router.post("/classify", response_model=None, openapi_extra=documented(ClassificationRequest))
async def classify(request: Request) -> Response:
    """The label of each input, and the probabilities of all labels."""
    return await answered(request, resolve_classification)


@router.post("/v1/score", response_model=None, openapi_extra=documented(ScoreRequest, LabelScoreRequest))
@router.post("/score", response_model=None, openapi_extra=documented(ScoreRequest), include_in_schema=False)
async def score(request: Request) -> Response:
    """How well texts fit each other, pair by pair; or, with label_token_ids, how likely each of these comes next."""
    made = await worked_on(request, resolve_scores)
    if isinstance(made, VectorSpec):
        return await vectors_reply(request, made)
    spec, model = await checked(request, made), model_of(request)
    spec = replace(spec, receipt=False, recorded=False)  # of what is scored nothing was generated
    return await reply(request, spec, LabelScoresWriter(spec, model.tokenizer, model.fingerprint))


@router.post("/v2/embed", response_model=None, openapi_extra=documented(CohereEmbedRequest))
async def cohere_embed(request: Request) -> Response:
    """Embeddings as Cohere's API has them."""
    return await answered(request, resolve_cohere_embedding)


@router.post("/v1/rerank", response_model=None, openapi_extra=documented(RerankRequest))
@router.post("/rerank", response_model=None, openapi_extra=documented(RerankRequest), include_in_schema=False)
async def rerank(request: Request) -> Response:
    """Documents by how well they fit a query, as Jina's API has it."""
    return await answered(request, resolve_rerank)


@router.post("/v2/rerank", response_model=None, openapi_extra=documented(RerankRequest))
async def cohere_rerank(request: Request) -> Response:
    """The same as Cohere's API has it."""
    return await answered(request, resolve_cohere_rerank)
