from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from quire.engine.common.errors import ContextLengthExceeded, InvalidRequest
from quire.engine.common.request_params import PoolingParams, Task
from quire.engine.text.pooling_inputs import encode_truncated
from quire.server.config import ServerConfig
from quire.server.generation.response_writers.vector_bodies import classification_body, embeddings_body
from quire.server.generation.vector_generation import VectorBodyWriter, VectorInput, VectorRequest
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.pooling import (
    ClassificationRequest,
    ConversationEmbeddingRequest,
    EmbeddingRequest,
    InputBody,
    PoolingBody,
    PoolingRequest,
)
from quire.server.protocol.request_bodies import ignored_params_header
from quire.server.resolve.checks import check_no_surrogates, check_token_ids
from quire.server.resolve.parse import parse_body, read_json_object, validate_body
from quire.server.resolve.prompts import (
    build_chat_prompt,
    build_dual_encoder_prompt,
    check_num_inputs,
    check_text_fits,
    list_inputs,
    resolve_truncation_limit,
    truncate_ids,
)
from quire.server.served_model import ServedModel

_CHAT_FIELDS = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template_kwargs",
    "truncate_prompt_tokens",
)
MAX_VECTOR_NUMBERS = 2**24
"""Limit of numbers in an answer with a vector per token."""


def resolve_embedding(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> VectorRequest:
    body_fields = read_json_object(body_bytes)
    if body_fields.get("messages") is not None and body_fields.get("input") is None:
        return _resolve_conversation_embedding(
            validate_body(body_fields, ConversationEmbeddingRequest), body_fields, model, config
        )
    body = validate_body(body_fields, EmbeddingRequest)
    answer = partial(embeddings_body, body.encoding_format, "embedding", token_vector_size(body, model))
    return build_embedding_request(body, answer, model, config, one_vector_per_text=False)


def build_embedding_request(
    body: EmbeddingRequest,
    write_body: VectorBodyWriter,
    model: ServedModel,
    config: ServerConfig,
    *,
    one_vector_per_text: bool = True,
) -> VectorRequest:
    check_pooling_task(body, "embed", model)
    if one_vector_per_text:
        check_one_vector_per_text(model)
    params = embedding_params(body, model)
    inputs = vector_inputs(tokenize_inputs(body, model), params)
    return build_vector_request(body, "embd", inputs, write_body, model, config)


def _resolve_conversation_embedding(
    body: ConversationEmbeddingRequest, body_fields: Mapping[str, Any], model: ServedModel, config: ServerConfig
) -> VectorRequest:
    check_pooling_task(body, "embed", model)
    same = {name: body_fields[name] for name in _CHAT_FIELDS if name in body_fields}
    chat = validate_body({"add_generation_prompt": False, **same}, ChatRequest)
    prompt = (
        build_dual_encoder_prompt(chat, model)
        if model.is_dual_encoder
        else build_chat_prompt(chat, model, None, trusted=False)
    )
    check_pooling_input_length(prompt.ids, model, "messages")
    answer = partial(embeddings_body, body.encoding_format, "embedding", token_vector_size(body, model))
    inputs = [VectorInput(prompt.ids, embedding_params(body, model), prompt.spans, prompt.images)]
    return build_vector_request(body, "embd", inputs, answer, model, config)


def token_vector_size(body: EmbeddingRequest | ConversationEmbeddingRequest, model: ServedModel) -> int | None:
    """Returns the numbers per vector if each token has a vector, otherwise None."""
    if model.pooling is None or model.pooling.pooling_type != "none":
        return None
    return body.dimensions or model.pooling.vector_size


def check_one_vector_per_text(model: ServedModel) -> None:
    if model.pooling is not None and model.pooling.pooling_type == "none":
        message = "this endpoint needs one vector per text, and --pooling-type none gives one per token"
        raise InvalidRequest(message, param="model")


def resolve_pooling(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> VectorRequest:
    body = parse_body(body_bytes, PoolingRequest)
    task = body.task or ("classify" if "classify" in model.tasks else "embed")
    check_pooling_task(body, task, model)
    params = embedding_params(body, model)
    if task == "classify":
        if body.dimensions is not None:
            raise InvalidRequest("dimensions applies to embeddings, and this model gives scores", param="dimensions")
        params = PoolingParams(task=task, activation=body.wants_activation)
    size = None if task == "classify" else token_vector_size(body, model)
    answer = partial(embeddings_body, body.encoding_format, "pooling", size)
    return build_vector_request(
        body, "pool", vector_inputs(tokenize_inputs(body, model), params), answer, model, config
    )


def resolve_classification(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> VectorRequest:
    body = parse_body(body_bytes, ClassificationRequest)
    check_pooling_task(body, "classify", model)
    params = PoolingParams(task="classify", activation=body.wants_activation)
    answer = partial(classification_body, () if model.pooling is None else model.pooling.labels)
    return build_vector_request(
        body, "classify", vector_inputs(tokenize_inputs(body, model), params), answer, model, config
    )


def check_pooling_task(body: PoolingBody, task: Task, model: ServedModel) -> None:
    model.resolve_model_name(body.model)
    model.check_task(task)


def embedding_params(body: EmbeddingRequest | ConversationEmbeddingRequest, model: ServedModel) -> PoolingParams:
    size = None if model.pooling is None else model.pooling.vector_size
    if body.dimensions is not None and size is not None and body.dimensions > size:
        message = f"dimensions must be at most the model's {size}, got {body.dimensions}"
        raise InvalidRequest(message, param="dimensions")
    return PoolingParams(dimensions=body.dimensions, activation=body.wants_activation)


def vector_inputs(prompts: Sequence[list[int]], params: PoolingParams) -> list[VectorInput]:
    return [VectorInput(ids, params) for ids in prompts]


def build_vector_request(
    body: PoolingBody,
    prefix: str,
    inputs: Sequence[VectorInput],
    write_body: VectorBodyWriter,
    model: ServedModel,
    config: ServerConfig,
) -> VectorRequest:
    pooling = model.pooling
    if (
        pooling is not None
        and pooling.pooling_type == "none"
        and sum(len(each.ids) for each in inputs) * pooling.vector_size > MAX_VECTOR_NUMBERS
    ):
        raise InvalidRequest(
            f"input: the vectors of all tokens have more than {MAX_VECTOR_NUMBERS} numbers: send less", param="input"
        )
    return VectorRequest(
        id_prefix=f"{prefix}-",
        body_id="" if body.request_id is None else f"{prefix}-{body.request_id}",
        model=model.resolve_model_name(body.model),
        inputs=inputs,
        write_body=write_body,
        body_priority=body.priority,
        body_cache_salt=body.cache_salt,
        timeout=body.timeout,
        queue_timeout=body.queue_timeout,
        headers=ignored_params_header(body.check_params_and_list_ignored(), config.strict),
    )


def tokenize_inputs(body: InputBody, model: ServedModel) -> list[list[int]]:
    inputs = list_inputs(body.input, "input")
    check_num_inputs(len(inputs), "input")
    texts = [one for one in inputs if isinstance(one, str)]
    if body.prompt_name is not None and len(texts) < len(inputs):
        raise InvalidRequest("prompt_name needs text input, not token ids", param="prompt_name")
    before = prompt_by_name(body.prompt_name, model) if texts else ""
    encoded = iter(tokenize_texts(body, [before + text for text in texts], model))
    return [next(encoded) if isinstance(one, str) else truncate_input_ids(body, one, model) for one in inputs]


def truncate_input_ids(body: InputBody, ids: list[int], model: ServedModel) -> list[int]:
    check_token_ids(ids, model.vocab_size, "input")
    limit = input_truncation_limit(body, model)
    ids = ids if limit is None else truncate_ids(ids, limit, body.truncation_side)
    check_pooling_input_length(ids, model, "input")
    return ids


def tokenize_texts(
    body: PoolingBody, texts: Sequence[str], model: ServedModel, param: str = "input"
) -> list[list[int]]:
    check_num_inputs(len(texts), param)
    limit = input_truncation_limit(body, model)
    add_special_tokens = body.add_special_tokens if isinstance(body, InputBody) else True
    for text in texts:
        check_no_surrogates(text, param)
        if limit is None:
            check_text_fits(model, text, param)
    if limit is not None:
        ids_by_text = encode_truncated(
            model.tokenizer, texts, limit, body.truncation_side, add_special_tokens=add_special_tokens
        )
    else:
        ids_by_text = model.tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
    for ids in ids_by_text:
        check_pooling_input_length(ids, model, param)
    return ids_by_text


def prompt_by_name(name: str | None, model: ServedModel) -> str:
    """Without a name, returns the model's default prompt, or "". Raises InvalidRequest."""
    if model.pooling is None:
        return ""
    prompts, name = model.pooling.prompts, name or model.pooling.default_prompt_name
    if name is None:
        return ""
    if name not in prompts:
        known = ", ".join(prompts) or "none"
        raise InvalidRequest(f"prompt_name is not one of the model's prompts ({known})", param="prompt_name")
    return prompts[name]


def input_truncation_limit(body: PoolingBody, model: ServedModel) -> int | None:
    """None means no limit."""
    return resolve_truncation_limit(body.truncate_prompt_tokens, model.context_length, model.context_length)


def check_pooling_input_length(ids: Sequence[int], model: ServedModel, param: str) -> None:
    if not ids:
        raise InvalidRequest(f"{param} cannot be empty", param=param)
    if len(ids) > model.context_length:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {model.context_length} tokens, but {param} came to {len(ids)} "
            "tokens. Please shorten it, or ask for truncate_prompt_tokens",
            param=param,
        )
