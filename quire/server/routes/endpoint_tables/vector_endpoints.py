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
        "An embedding of each input, or of a conversation, which may have images.",
        resolve_embedding,
        (EmbeddingRequest, ConversationEmbeddingRequest),
    ),
    Endpoint(
        "/pooling",
        "pool",
        "The model's output for each input: an embedding, or the scores of its labels.",
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
        "Embeddings in the form of Cohere's API.",
        resolve_cohere_embedding,
        (CohereEmbedRequest,),
    ),
    Endpoint(
        "/v1/rerank",
        "rerank",
        "Documents ranked by relevance to a query, in the form of Jina's API.",
        resolve_rerank,
        (RerankRequest,),
    ),
    Endpoint("/rerank", "rerank", "As /v1/rerank.", resolve_rerank, (RerankRequest,), in_schema=False),
    Endpoint(
        "/v2/rerank",
        "cohere_rerank",
        "The same in the form of Cohere's API.",
        partial(resolve_rerank, cohere=True),
        (RerankRequest,),
    ),
)
