"""Requests to score or rank pairs of texts. A reranker gets one input per pair; an embedding model gets each distinct
text once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import PoolingParams
from quire.engine.text.pooling_inputs import encode_pairs_with_second_start, encode_reranker_prompts
from quire.server.config import ServerConfig
from quire.server.generation.response_writers.vector_bodies import ScorePairs, rerank_body, scores_body
from quire.server.generation.vector_generation import VectorInput, VectorRequest
from quire.server.protocol.pooling import RerankRequest, ScoreRequest, TextPairBody
from quire.server.resolve.checks import NeedsWorker, check_no_surrogates
from quire.server.resolve.parse import parse_body
from quire.server.resolve.pooling_requests import (
    build_vector_request,
    check_one_vector_per_text,
    check_pooling_input_length,
    check_pooling_task,
    input_truncation_limit,
    prompt_by_name,
    tokenize_texts,
    vector_inputs,
)
from quire.server.resolve.prompts import check_num_inputs, check_text_fits
from quire.server.served_model import ServedModel

MAX_INLINE_CHARACTERS = 2**16
"""Maximum number of characters in all pairs together. Longer pairs are encoded only in a worker."""
NO_LIMIT_MESSAGE = "max_tokens_per_doc needs a cross-encoder; give truncate_prompt_tokens"
PairInputs = tuple[list[VectorInput], ScorePairs]


def resolve_score(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> VectorRequest:
    body = parse_body(body_bytes, ScoreRequest)
    names = ("text_1", "text_2") if body.queries is None else ("queries", "documents")
    firsts, seconds = body.first_texts, body.second_texts
    for name, texts in zip(names, (firsts, seconds), strict=True):
        if not texts:
            raise InvalidRequest(f"{name} must not be empty", param=name)
    if len(firsts) not in (1, len(seconds)):
        message = f"{names[0]} has {len(firsts)} texts and {names[1]} {len(seconds)}: give one text or equally many"
        raise InvalidRequest(message, param=names[0])
    firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
    inputs, pairs = build_pair_inputs(body, firsts, seconds, names, model)
    return build_vector_request(body, "score", inputs, partial(scores_body, pairs), model, config)


def resolve_rerank(
    body_bytes: bytes, model: ServedModel, config: ServerConfig, *, cohere: bool = False
) -> VectorRequest:
    body = parse_body(body_bytes, RerankRequest)
    documents = body.document_texts
    if not documents:
        raise InvalidRequest("documents must not be empty", param="documents")
    queries = [body.query] * len(documents)
    inputs, pairs = build_pair_inputs(body, queries, documents, ("query", "documents"), model)
    shown = not cohere if body.return_documents is None else body.return_documents
    answer = partial(rerank_body, pairs, documents if shown else None, body.top_n or 0, cohere=cohere)
    return build_vector_request(body, "rerank", inputs, answer, model, config)


def build_pair_inputs(
    body: TextPairBody, firsts: Sequence[str], seconds: Sequence[str], names: tuple[str, str], model: ServedModel
) -> PairInputs:
    """`names`: the body's two fields, which errors name. Raises InvalidRequest, NeedsWorker."""
    check_num_inputs(len(seconds), names[1])
    for name, texts in zip(names, (firsts, seconds), strict=True):
        for text in dict.fromkeys(texts):
            check_no_surrogates(text, name)
    if body.truncation_side != "right":
        raise InvalidRequest("truncation_side is always right for pairs of texts", param="truncation_side")
    if not model.expendable and sum(map(len, firsts)) + sum(map(len, seconds)) > MAX_INLINE_CHARACTERS:
        raise NeedsWorker  # a short body can repeat a long text
    pooling = model.pooling
    _check_can_score(body, model)
    if "classify" not in model.tasks or pooling is None:
        _refuse_instruction(body)
        return _embedding_inputs(body, firsts, seconds, names, model)
    if len(pooling.labels) != 1:
        raise InvalidRequest(f"the model classifies {len(pooling.labels)} labels and gives no score", param="model")
    if pooling.classifier_tokens is not None:
        return _generative_reranker_inputs(body, firsts, seconds, names, model)
    _refuse_instruction(body)
    limit = _pair_truncation_limit(body, model)
    if limit is None:
        for text in dict.fromkeys([*firsts, *seconds]):
            check_text_fits(model, text, names[1])
    longest = body.max_tokens_per_doc if isinstance(body, RerankRequest) else None
    pairs = encode_pairs_with_second_start(model.tokenizer, list(zip(firsts, seconds, strict=True)), limit, longest)
    for ids, _ in pairs:
        check_pooling_input_length(ids, model, names[1])
    inputs = [
        VectorInput(ids, PoolingParams(task="classify", activation=body.wants_activation, second_segment=begin))
        for ids, begin in pairs
    ]
    return inputs, None


def _check_can_score(body: TextPairBody, model: ServedModel) -> None:
    if model.tasks == ("generate",):
        name = model.resolve_model_name(body.model)
        what = f"The model `{name}` generates text and cannot score pairs of texts"
        served = "serve a reranker or an embedding model (`quire models` lists some)"
        raise InvalidRequest(f"{what}: {served}, or this one with --pooling-type last", param="model")
    check_pooling_task(body, "classify" if "classify" in model.tasks else "embed", model)


def _refuse_instruction(body: TextPairBody) -> None:
    if body.instruction is not None:
        raise InvalidRequest("instruction needs a model that reads one", param="instruction")


def _refuse_document_limit(body: TextPairBody) -> None:
    if isinstance(body, RerankRequest) and body.max_tokens_per_doc is not None:
        raise InvalidRequest(NO_LIMIT_MESSAGE, param="max_tokens_per_doc")


def _pair_truncation_limit(body: TextPairBody, model: ServedModel) -> int | None:
    limit = input_truncation_limit(body, model)
    return model.context_length if limit is None and isinstance(body, RerankRequest) else limit


def _embedding_inputs(
    body: TextPairBody, firsts: Sequence[str], seconds: Sequence[str], names: tuple[str, str], model: ServedModel
) -> PairInputs:
    """Each distinct text is one input. Rankings prepend the model's query and document prompts."""
    check_one_vector_per_text(model)
    prompt_by_role = {"query": "", "document": ""}
    known = {} if model.pooling is None else model.pooling.prompts
    for role in prompt_by_role:
        prompt_name = role if isinstance(body, RerankRequest) and role in known else None
        prompt_by_role[role] = prompt_by_name(prompt_name, model)
    if isinstance(body, RerankRequest) and body.truncate_prompt_tokens is None:
        body = body.model_copy(update={"truncate_prompt_tokens": -1})
    _refuse_document_limit(body)
    index_by_text: dict[str, int] = {}
    for text in (
        *(prompt_by_role["query"] + each for each in firsts),
        *(prompt_by_role["document"] + each for each in seconds),
    ):
        index_by_text.setdefault(text, len(index_by_text))
    check_num_inputs(len(index_by_text), names[1])
    prompts = tokenize_texts(body, list(index_by_text), model, names[1])
    pairs = [
        (index_by_text[prompt_by_role["query"] + first], index_by_text[prompt_by_role["document"] + second])
        for first, second in zip(firsts, seconds, strict=True)
    ]
    return vector_inputs(prompts, PoolingParams(activation=True)), pairs


def _generative_reranker_inputs(
    body: TextPairBody, firsts: Sequence[str], seconds: Sequence[str], names: tuple[str, str], model: ServedModel
) -> PairInputs:
    """Makes Qwen3-Reranker's prompts. A long prompt loses the end of its document."""
    _refuse_document_limit(body)
    limit = _pair_truncation_limit(body, model)
    for text in dict.fromkeys(firsts):
        check_text_fits(model, text, names[0])
    for text in dict.fromkeys(seconds if limit is None else ()):
        check_text_fits(model, text, names[1])
    prompts = encode_reranker_prompts(model.tokenizer, list(zip(firsts, seconds, strict=True)), body.instruction, limit)
    for ids in prompts:
        check_pooling_input_length(ids, model, names[1])
    return vector_inputs(prompts, PoolingParams(task="classify", activation=body.wants_activation)), None
