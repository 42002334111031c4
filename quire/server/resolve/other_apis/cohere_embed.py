from __future__ import annotations

from dataclasses import replace
from functools import partial

from quire.server.config import ServerConfig
from quire.server.generation.response_writers.vector_bodies import cohere_embed_body
from quire.server.generation.vector_generation import VectorRequest
from quire.server.protocol.pooling import CohereEmbedRequest, EmbeddingRequest, PoolingBody
from quire.server.protocol.request_bodies import ignored_params_header
from quire.server.resolve.other_apis.chat_conversion import rename_fields_in_raised_errors
from quire.server.resolve.parse import parse_body, validate_body
from quire.server.resolve.pooling_requests import build_embedding_request
from quire.server.served_model import ServedModel

COHERE_FIELD_NAMES = {"input": "texts", "dimensions": "output_dimension", "truncate_prompt_tokens": "max_tokens"}


def resolve_cohere_embedding(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> VectorRequest:
    body = parse_body(body_bytes, CohereEmbedRequest)
    known = {} if model.pooling is None else model.pooling.prompts
    input_type = body.input_type or ""
    fields = body.model_dump(include=set(PoolingBody.model_fields), exclude_unset=True)
    fields |= {"input": body.texts, "dimensions": body.output_dimension}
    fields["prompt_name"] = next((each for each in (input_type, input_type.rpartition("_")[2]) if each in known), None)
    if body.truncate != "NONE":
        fields["truncate_prompt_tokens"] = min(body.max_tokens or model.context_length, model.context_length)
        fields["truncation_side"] = "left" if body.truncate == "START" else "right"
    answer = partial(cohere_embed_body, tuple(body.embedding_types), tuple(body.texts))
    with rename_fields_in_raised_errors(COHERE_FIELD_NAMES):
        request = build_embedding_request(validate_body(fields, EmbeddingRequest), answer, model, config)
    return replace(request, headers=ignored_params_header(body.check_params_and_list_ignored(), config.strict))
