"""From Cohere's /v2/embed to embeddings."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from quire.server.config import ServerConfig
from quire.server.generation.answers.vectors import cohere_embeddings
from quire.server.generation.vectors import VectorSpec
from quire.server.protocol.common import ignored_header
from quire.server.protocol.pooling import CohereEmbedRequest, EmbeddingRequest, PoolingBody
from quire.server.resolve.parse import parse, validated
from quire.server.resolve.pooling import embedding_spec
from quire.server.resolve.translated.as_chat import named_by_caller
from quire.server.served_model import ServedModel

NAMES = {"input": "texts", "dimensions": "output_dimension", "truncate_prompt_tokens": "max_tokens"}


def resolve_cohere_embedding(given: bytes, model: ServedModel, config: ServerConfig) -> VectorSpec:
    """Raises ModelNotFound, and InvalidRequest naming the parameter."""
    body = parse(given, CohereEmbedRequest)
    known = {} if model.pooling is None else model.pooling.prompts
    asked = body.input_type or ""
    fields = body.model_dump(include=set(PoolingBody.model_fields), exclude_unset=True)
    fields |= {"input": body.texts, "dimensions": body.output_dimension}
    fields["prompt_name"] = next((each for each in (asked, asked.rpartition("_")[2]) if each in known), None)
    if body.truncate != "NONE":
        fields["truncate_prompt_tokens"] = min(body.max_tokens or model.context_length, model.context_length)
        fields["truncation_side"] = "left" if body.truncate == "START" else "right"
    answer = partial(cohere_embeddings, tuple(body.embedding_types), tuple(body.texts))
    with named_by_caller(NAMES):
        spec = embedding_spec(validated(fields, EmbeddingRequest), answer, model, config)
    return replace(spec, headers=ignored_header(body.ignored_params(), config.strict))
