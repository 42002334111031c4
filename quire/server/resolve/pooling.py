"""From requests for vectors to their specs: embeddings, labels, and whatever the model makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from quire.engine import random_source
from quire.engine.errors import ContextLengthExceeded, InvalidRequest
from quire.engine.text.pairs import encode_cut
from quire.engine.types import PoolingParams, Task
from quire.server.config import ServerConfig
from quire.server.generation.answers.vectors import embeddings, labels
from quire.server.generation.vectors import VectorAnswer, VectorInput, VectorSpec
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.common import ignored_header
from quire.server.protocol.pooling import (
    ClassificationRequest,
    ConversationEmbeddingRequest,
    EmbeddingRequest,
    InputBody,
    PoolingBody,
    PoolingRequest,
)
from quire.server.resolve.checks import check_text, check_token_ids
from quire.server.resolve.parse import parse, read_object, validated
from quire.server.resolve.prompts import apart, chat_prompt, check_count, check_fits, cut, cut_limit, listed
from quire.server.served_model import ServedModel

_OF_CHATS = (
    *("messages", "add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template_kwargs"),
    "truncate_prompt_tokens",
)
"""Fields that conversations have in a chat too."""
MAX_NUMBERS = 2**24
"""Of one answer, where each token has a vector."""


def resolve_embedding(given: bytes, model: ServedModel, config: ServerConfig) -> VectorSpec:
    """Raises ModelNotFound, and InvalidRequest naming the parameter."""
    asked = read_object(given)
    if asked.get("messages") is not None and asked.get("input") is None:
        return _of_conversation(validated(asked, ConversationEmbeddingRequest), asked, model, config)
    body = validated(asked, EmbeddingRequest)
    answer = partial(embeddings, body.encoding_format, "embedding", token_size(body, model))
    return embedding_spec(body, answer, model, config, whole=False)


def embedding_spec(
    body: EmbeddingRequest, answer: VectorAnswer, model: ServedModel, config: ServerConfig, *, whole: bool = True
) -> VectorSpec:
    """`whole`: each text must have one vector. Raises as above."""
    check_asked(body, "embed", model)
    if whole:
        check_whole(model)
    params = embedding_params(body, model)
    return vector_spec(body, "embd", input_ids(body, model), params, answer, model, config)


def _of_conversation(
    body: ConversationEmbeddingRequest, asked: Mapping[str, Any], model: ServedModel, config: ServerConfig
) -> VectorSpec:
    """Raises as above, and what chat_prompt raises."""
    check_asked(body, "embed", model)
    same = {name: asked[name] for name in _OF_CHATS if name in asked}
    chat = validated({"add_generation_prompt": False, **same}, ChatRequest)
    prompt = apart(chat, model) if model.pairs else chat_prompt(chat, model, None, trusted=False)
    check_vector_length(prompt.ids, model, "messages")
    answer = partial(embeddings, body.encoding_format, "embedding", token_size(body, model))
    spec = vector_spec(body, "embd", [prompt.ids], embedding_params(body, model), answer, model, config)
    shown = [replace(each, spans=prompt.spans, images=prompt.images) for each in spec.inputs]
    return replace(spec, inputs=shown)


def token_size(body: EmbeddingRequest | ConversationEmbeddingRequest, model: ServedModel) -> int | None:
    """Numbers of each token's vector, where tokens have some."""
    if model.pooling is None or model.pooling.kind != "none":
        return None
    return body.dimensions or model.pooling.size


def check_whole(model: ServedModel) -> None:
    """Raises InvalidRequest where a text has no vector of its own."""
    if model.pooling is not None and model.pooling.kind == "none":
        message = "this endpoint needs one vector of each text, and --pooling-type none gives one of each token"
        raise InvalidRequest(message, param="model")


def resolve_pooling(given: bytes, model: ServedModel, config: ServerConfig) -> VectorSpec:
    """Raises as above."""
    body = parse(given, PoolingRequest)
    task = body.task or ("classify" if "classify" in model.tasks else "embed")
    check_asked(body, task, model)
    params = embedding_params(body, model)
    if task == "classify":
        if body.dimensions is not None:
            raise InvalidRequest("dimensions is about embeddings, and this model gives scores", param="dimensions")
        params = PoolingParams(task=task, activation=body.activation)
    size = None if task == "classify" else token_size(body, model)
    answer = partial(embeddings, body.encoding_format, "pooling", size)
    return vector_spec(body, "pool", input_ids(body, model), params, answer, model, config)


def resolve_classification(given: bytes, model: ServedModel, config: ServerConfig) -> VectorSpec:
    """Raises as above."""
    body = parse(given, ClassificationRequest)
    check_asked(body, "classify", model)
    params = PoolingParams(task="classify", activation=body.activation)
    answer = partial(labels, () if model.pooling is None else model.pooling.labels)
    return vector_spec(body, "classify", input_ids(body, model), params, answer, model, config)


def check_asked(body: PoolingBody, task: Task, model: ServedModel) -> None:
    """Raises ModelNotFound, and InvalidRequest for a task that the model is not made for."""
    model.answer_name(body.model)
    model.check_task(task)


def embedding_params(body: EmbeddingRequest | ConversationEmbeddingRequest, model: ServedModel) -> PoolingParams:
    size = None if model.pooling is None else model.pooling.size
    if body.dimensions is not None and size is not None and body.dimensions > size:
        message = f"dimensions must be at most the model's {size}, got {body.dimensions}"
        raise InvalidRequest(message, param="dimensions")
    return PoolingParams(dimensions=body.dimensions, activation=body.activation)


def vector_spec(
    body: PoolingBody,
    prefix: str,
    prompts: Sequence[list[int]],
    params: PoolingParams | Sequence[PoolingParams],
    answer: VectorAnswer,
    model: ServedModel,
    config: ServerConfig,
) -> VectorSpec:
    """`params`: of all prompts, or of each."""
    each = [params] * len(prompts) if isinstance(params, PoolingParams) else params
    pooling = model.pooling
    if pooling is not None and pooling.kind == "none" and sum(map(len, prompts)) * pooling.size > MAX_NUMBERS:
        raise InvalidRequest(
            f"input: vectors of all tokens are more than {MAX_NUMBERS} numbers: send less", param="input"
        )
    return VectorSpec(
        id=f"{prefix}-{random_source.token_hex(16)}",
        id_prefix=f"{prefix}-",
        name="" if body.request_id is None else f"{prefix}-{body.request_id}",
        model=model.answer_name(body.model),
        inputs=[VectorInput(ids, one) for ids, one in zip(prompts, each, strict=True)],
        answer=answer,
        priority=body.priority,
        cache_salt=body.cache_salt,
        timeout=body.timeout,
        queue_timeout=body.queue_timeout,
        headers=ignored_header(body.ignored_params(), config.strict),
    )


def input_ids(body: InputBody, model: ServedModel) -> list[list[int]]:
    """Token ids of the inputs, at least one. Raises InvalidRequest naming the parameter."""
    inputs = listed(body.input, "input")
    check_count(len(inputs), "input")
    texts = [one for one in inputs if isinstance(one, str)]
    if body.prompt_name is not None and len(texts) < len(inputs):
        raise InvalidRequest("prompt_name needs an input of texts, not of token ids", param="prompt_name")
    before = named_prompt(body.prompt_name, model) if texts else ""
    encoded = iter(text_ids(body, [before + text for text in texts], model))
    return [next(encoded) if isinstance(one, str) else checked_ids(body, one, model) for one in inputs]


def checked_ids(body: InputBody, ids: list[int], model: ServedModel) -> list[int]:
    """An input that is given as token ids, cut where that is asked for. Raises InvalidRequest."""
    check_token_ids(ids, model.vocab_size, "input")
    limit = pooled_limit(body, model)
    ids = ids if limit is None else cut(ids, limit, body.truncation_side)
    check_vector_length(ids, model, "input")
    return ids


def text_ids(
    body: PoolingBody, texts: Sequence[str], model: ServedModel, param: str = "input", *, special: bool | None = None
) -> list[list[int]]:
    """Token ids of texts. Raises InvalidRequest naming the parameter."""
    check_count(len(texts), param)
    limit = pooled_limit(body, model)
    if special is None:
        special = body.add_special_tokens if isinstance(body, InputBody) else True
    for text in texts:
        check_text(text, param)
        if limit is None:
            check_fits(model, text, param)
    if limit is not None:
        found = encode_cut(model.tokenizer, texts, limit, body.truncation_side, add_special_tokens=special)
    else:
        found = model.tokenizer.encode_batch(texts, add_special_tokens=special)
    for ids in found:
        check_vector_length(ids, model, param)
    return found


def named_prompt(name: str | None, model: ServedModel) -> str:
    """The model's own text of this name, or the one it has for calls that name none. Raises InvalidRequest."""
    if model.pooling is None:
        return ""
    prompts, name = model.pooling.prompts, name or model.pooling.default_prompt
    if name is None:
        return ""
    if name not in prompts:
        known = ", ".join(prompts) or "none"
        raise InvalidRequest(f"prompt_name is not one of the model's prompts ({known})", param="prompt_name")
    return prompts[name]


def pooled_limit(body: PoolingBody, model: ServedModel) -> int | None:
    """The most tokens of an input that are kept; None: all. Raises InvalidRequest."""
    return cut_limit(body.truncate_prompt_tokens, model.context_length, model.context_length)


def check_vector_length(ids: Sequence[int], model: ServedModel, param: str) -> None:
    """A prompt must have a token; unlike one that is answered, it may fill the context."""
    if not ids:
        raise InvalidRequest(f"{param} cannot be empty", param=param)
    if len(ids) > model.context_length:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {model.context_length} tokens, but {param} came to {len(ids)} "
            "tokens. Please shorten it, or ask for truncate_prompt_tokens",
            param=param,
        )
