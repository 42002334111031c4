from __future__ import annotations

from functools import partial

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
from quire.server.resolve.other_apis.cohere_embed import resolve_cohere_embedding
from quire.server.resolve.other_apis.label_scores import resolve_score_or_label_scores
from quire.server.resolve.pooling_requests import resolve_classification, resolve_embedding, resolve_pooling
from quire.server.resolve.text_pairs import resolve_rerank
from quire.server.routes.endpoint_tables.endpoint import Endpoint

VECTOR_ENDPOINTS = (
    Endpoint(
        "/v1/embeddings",
        "create_embeddings",
        "A vector of each input, or of a conversation, which may show images.",
        resolve_embedding,
        (EmbeddingRequest, ConversationEmbeddingRequest),
    ),
    Endpoint(
        "/pooling",
        "pool",
        "What the model makes of each input: an embedding, or the scores of its labels.",
        resolve_pooling,
        (PoolingRequest,),
    ),
    Endpoint(
        "/classify",
        "classify",
        "The label of each input, and the probabilities of all labels.",
        resolve_classification,
        (ClassificationRequest,),
    ),
    Endpoint(
        "/v1/score",
        "score",
        "How well texts fit each other, pair by pair; or, with label_token_ids, how likely each of these comes next.",
        resolve_score_or_label_scores,
        (ScoreRequest, LabelScoreRequest),
    ),
    Endpoint("/score", "score", "As /v1/score.", resolve_score_or_label_scores, (ScoreRequest,), in_schema=False),
    Endpoint(
        "/v2/embed",
        "cohere_embed",
        "Embeddings as Cohere's API has them.",
        resolve_cohere_embedding,
        (CohereEmbedRequest,),
    ),
    Endpoint(
        "/v1/rerank",
        "rerank",
        "Documents by how well they fit a query, as Jina's API has it.",
        resolve_rerank,
        (RerankRequest,),
    ),
    Endpoint("/rerank", "rerank", "As /v1/rerank.", resolve_rerank, (RerankRequest,), in_schema=False),
    Endpoint(
        "/v2/rerank",
        "cohere_rerank",
        "The same as Cohere's API has it.",
        partial(resolve_rerank, cohere=True),
        (RerankRequest,),
    ),
)
