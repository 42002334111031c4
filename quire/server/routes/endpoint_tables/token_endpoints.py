from __future__ import annotations

from quire.server.access.admission import RateLimitedRoute
from quire.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from quire.server.resolve.tokenize_requests import answer_apply_template, answer_detokenize, answer_tokenize
from quire.server.routes.endpoint_tables.endpoint import Endpoint

TOKEN_ENDPOINTS = (
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
