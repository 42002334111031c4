"""The endpoints whose answer follows from the body of a POST alone. Each is a row of a table."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from quire.server.access.admission import GenerationRoute, RateLimitedRoute
from quire.server.error_responses import SYSTEM_ONE_PATH
from quire.server.generation.vector_generation import VectorSpec
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.completions import CompletionRequest
from quire.server.protocol.messages import CountTokensRequest, MessagesRequest
from quire.server.protocol.ollama import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
)
from quire.server.protocol.pooling import (
    ClassificationRequest,
    CohereEmbedRequest,
    ConversationEmbeddingRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from quire.server.protocol.questions.decisions import DecisionRequest
from quire.server.protocol.questions.label_scores import LabelScoreRequest
from quire.server.protocol.questions.systemone import SystemOneRequest
from quire.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from quire.server.resolve.chat import resolve_chat
from quire.server.resolve.common import Resolved
from quire.server.resolve.completions import resolve_completion
from quire.server.resolve.invocations import resolve_invocation
from quire.server.resolve.pooling_requests import resolve_classification, resolve_embedding, resolve_pooling
from quire.server.resolve.text_pairs import resolve_rerank
from quire.server.resolve.tokenize_requests import JsonReply, answer_apply_template, answer_detokenize, answer_tokenize
from quire.server.resolve.translated import ollama
from quire.server.resolve.translated.cohere_embed import resolve_cohere_embedding
from quire.server.resolve.translated.decisions import (
    resolve_decisions,
    resolve_score_or_label_scores,
    resolve_systemone,
)
from quire.server.resolve.translated.messages import count_message_tokens, resolve_message
from quire.server.routes.bodies import Documented, Work, checked, worked_on
from quire.server.routes.reply import reply, vectors_reply
from quire.server.runtime.model_runtime import get_runtime
from quire.server.served_model import get_model

Resolution = Resolved | VectorSpec | JsonReply


@dataclass(frozen=True, slots=True)
class Endpoint:
    path: str
    name: str
    """The name of the operation in the API's description."""
    description: str
    resolve: Work[Resolution]
    """Makes of the body what is to be computed, or the answer itself."""
    body_models: tuple[type[BaseModel], ...]
    """The models, one of which a body must match."""
    route_class: type[RateLimitedRoute] = GenerationRoute
    in_schema: bool = True
    """Whether the API's description has it: not where it is another name of one that is there."""


ENDPOINTS = (
    Endpoint(
        "/v1/completions",
        "create_completion",
        "Continue a prompt, or each of several.",
        resolve_completion,
        (CompletionRequest,),
    ),
    Endpoint("/v1/chat/completions", "create_chat_completion", "Answer a conversation.", resolve_chat, (ChatRequest,)),
    Endpoint("/v1/messages", "create_message", "Answer a conversation.", resolve_message, (MessagesRequest,)),
    Endpoint(
        "/v1/messages/count_tokens",
        "count_message_tokens",
        "The number of tokens that a conversation has as a prompt.",
        count_message_tokens,
        (CountTokensRequest,),
        RateLimitedRoute,
    ),
    Endpoint(
        "/v1/decisions",
        "create_decision",
        "Answer questions about an input by the probabilities of their options; no text is generated.",
        resolve_decisions,
        (DecisionRequest,),
    ),
    Endpoint(
        SYSTEM_ONE_PATH,
        "evaluate",
        "Answer questions about a state by the probabilities of their options; no text is generated.",
        resolve_systemone,
        (SystemOneRequest,),
    ),
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
    Endpoint(
        "/invocations",
        "invoke",
        "A body with messages is /v1/chat/completions', one with a prompt /v1/completions', with an input "
        "/v1/embeddings'\n(or /classify's), with a query /v1/rerank's, with text_1 /v1/score's.",
        resolve_invocation,
        (ChatRequest, CompletionRequest, EmbeddingRequest, RerankRequest, ScoreRequest),
    ),
    Endpoint("/api/chat", "chat", "Answer a conversation.", ollama.resolve_ollama_chat, (OllamaChatRequest,)),
    Endpoint(
        "/api/generate",
        "generate",
        "Answer a prompt, or continue one that is raw.",
        ollama.resolve_ollama_generate,
        (OllamaGenerateRequest,),
    ),
    Endpoint(
        "/api/embed",
        "embed",
        "A vector of each input, of length 1.",
        ollama.resolve_ollama_embed,
        (OllamaEmbedRequest,),
    ),
    Endpoint(
        "/api/embeddings",
        "embeddings",
        "A vector of one prompt.",
        ollama.resolve_ollama_embeddings,
        (OllamaEmbeddingsRequest,),
    ),
    Endpoint(
        "/tokenize",
        "tokenize",
        "Token ids of a prompt, or of a conversation as the chat template writes it.",
        answer_tokenize,
        (TokenizeRequest,),
        RateLimitedRoute,
    ),
    Endpoint(
        "/detokenize",
        "detokenize",
        "The text of token ids, special tokens shown.",
        answer_detokenize,
        (DetokenizeRequest,),
        RateLimitedRoute,
    ),
    Endpoint(
        "/apply-template",
        "apply_template",
        "A conversation as the chat template writes it.",
        answer_apply_template,
        (TokenizeRequest,),
        RateLimitedRoute,
    ),
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
        get_runtime(request).metrics.count_questions(question.type for question in spec.questions)
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
