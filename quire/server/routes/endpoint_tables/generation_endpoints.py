from __future__ import annotations

from quire.server.access.admission import RateLimitedRoute
from quire.server.error_responses import SYSTEM_ONE_PATH
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.completions import CompletionRequest
from quire.server.protocol.messages import CountTokensRequest, MessagesRequest
from quire.server.protocol.questions.decisions import DecisionRequest
from quire.server.protocol.questions.systemone import SystemOneRequest
from quire.server.resolve.chat import resolve_chat
from quire.server.resolve.completions import resolve_completion
from quire.server.resolve.other_apis.decisions import resolve_decisions, resolve_systemone_request
from quire.server.resolve.other_apis.messages import count_message_tokens, resolve_message
from quire.server.routes.endpoint_tables.endpoint import Endpoint

GENERATION_ENDPOINTS = (
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
        "Number of prompt tokens of a conversation.",
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
        resolve_systemone_request,
        (SystemOneRequest,),
    ),
)
