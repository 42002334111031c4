"""From /v1/score and /v1/rerank to specs: a cross-encoder reads pairs, an embedding model each text once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from quire.engine.errors import InvalidRequest
from quire.engine.text.pairs import encode_judged, encode_pairs
from quire.engine.types import PoolingParams
from quire.server.config import ServerConfig
from quire.server.generation.answers.vectors import Pairs, ranking, scores
from quire.server.generation.vectors import VectorSpec
from quire.server.protocol.pooling import PairBody, RerankRequest, ScoreRequest
from quire.server.resolve.checks import NeedsWorker, check_text
from quire.server.resolve.parse import parse
from quire.server.resolve.pooling import (
    check_asked,
    check_vector_length,
    check_whole,
    named_prompt,
    pooled_limit,
    text_ids,
    vector_spec,
)
from quire.server.resolve.prompts import check_count, check_fits
from quire.server.served_model import ServedModel

QUICK_CHARACTERS = 2**16
"""Of all pairs; more are tokenized by a worker."""
NO_LIMIT = "max_tokens_per_doc needs a cross-encoder; give truncate_prompt_tokens"
Inputs = tuple[list[list[int]], list[PoolingParams], Pairs]


def resolve_score(given: bytes, model: ServedModel, config: ServerConfig) -> VectorSpec:
    """Raises ModelNotFound, and InvalidRequest naming the parameter."""
    body = parse(given, ScoreRequest)
    names = ("text_1", "text_2") if body.queries is None else ("queries", "documents")
    firsts, seconds = body.firsts, body.seconds
    for name, texts in zip(names, (firsts, seconds), strict=True):
        if not texts:
            raise InvalidRequest(f"{name} must not be empty", param=name)
    if len(firsts) not in (1, len(seconds)):
        message = f"{names[0]} has {len(firsts)} texts and {names[1]} {len(seconds)}: give one or as many"
        raise InvalidRequest(message, param=names[0])
    firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
    prompts, params, pairs = pair_inputs(body, firsts, seconds, names, model)
    return vector_spec(body, "score", prompts, params, partial(scores, pairs), model, config)


def resolve_rerank(given: bytes, model: ServedModel, config: ServerConfig, *, cohere: bool = False) -> VectorSpec:
    """As Jina's API has it, or Cohere's second version. Raises as above."""
    body = parse(given, RerankRequest)
    documents = body.texts
    if not documents:
        raise InvalidRequest("documents must not be empty", param="documents")
    queries = [body.query] * len(documents)
    prompts, params, pairs = pair_inputs(body, queries, documents, ("query", "documents"), model)
    shown = not cohere if body.return_documents is None else body.return_documents
    answer = partial(ranking, pairs, documents if shown else None, body.top_n or 0, cohere=cohere)
    return vector_spec(body, "rerank", prompts, params, answer, model, config)


def pair_inputs(
    body: PairBody, firsts: Sequence[str], seconds: Sequence[str], names: tuple[str, str], model: ServedModel
) -> Inputs:
    """The prompts that score such pairs, and how. Raises InvalidRequest naming one of `names`."""
    check_count(len(seconds), names[1])
    for name, texts in zip(names, (firsts, seconds), strict=True):
        for text in dict.fromkeys(texts):
            check_text(text, name)
    if body.truncation_side != "right":
        raise InvalidRequest("truncation_side is always right for pairs of texts", param="truncation_side")
    if not model.expendable and sum(map(len, firsts)) + sum(map(len, seconds)) > QUICK_CHARACTERS:
        raise NeedsWorker  # a short body may name many pairs of a long text
    pooling = model.pooling
    _check_scores(body, model)
    if "classify" not in model.tasks or pooling is None:
        _check_instruction(body)
        return _by_cosine(body, firsts, seconds, names, model)
    if len(pooling.labels) != 1:
        raise InvalidRequest(f"the model tells {len(pooling.labels)} labels apart and gives no score", param="model")
    if pooling.score_tokens is not None:
        return _judged(body, firsts, seconds, names, model)
    _check_instruction(body)
    limit = _pair_limit(body, model)
    if limit is None:
        for text in dict.fromkeys([*firsts, *seconds]):
            check_fits(model, text, names[1])
    longest = body.max_tokens_per_doc if isinstance(body, RerankRequest) else None
    pairs = encode_pairs(model.tokenizer, list(zip(firsts, seconds, strict=True)), limit, longest)
    for ids, _ in pairs:
        check_vector_length(ids, model, names[1])
    params = [PoolingParams(task="classify", activation=body.activation, second_segment=begin) for _, begin in pairs]
    return [ids for ids, _ in pairs], params, None


def _check_scores(body: PairBody, model: ServedModel) -> None:
    """Raises ModelNotFound, and InvalidRequest for a model that only writes text."""
    if model.tasks == ("generate",):
        name = model.answer_name(body.model)
        what = f"The model `{name}` writes text and gives no scores of pairs of texts"
        served = "serve a reranker or an embedding model (`quire models` lists some)"
        raise InvalidRequest(f"{what}: {served}, or this one with --pooling-type last", param="model")
    check_asked(body, "classify" if "classify" in model.tasks else "embed", model)


def _check_instruction(body: PairBody) -> None:
    """Raises InvalidRequest."""
    if body.instruction is not None:
        raise InvalidRequest("instruction needs a model that reads one", param="instruction")


def _check_no_limit(body: PairBody) -> None:
    """Raises InvalidRequest."""
    if isinstance(body, RerankRequest) and body.max_tokens_per_doc is not None:
        raise InvalidRequest(NO_LIMIT, param="max_tokens_per_doc")


def _pair_limit(body: PairBody, model: ServedModel) -> int | None:
    """Rankings cut what is too long, as the APIs that they come from do; scores do so if asked."""
    limit = pooled_limit(body, model)
    return model.context_length if limit is None and isinstance(body, RerankRequest) else limit


def _by_cosine(
    body: PairBody, firsts: Sequence[str], seconds: Sequence[str], names: tuple[str, str], model: ServedModel
) -> Inputs:
    """Each text becomes one input, however often it is compared. For rankings, the model's own prompts for queries and
    documents precede the texts, if it has them."""
    check_whole(model)
    before = {"query": "", "document": ""}
    known = {} if model.pooling is None else model.pooling.prompts
    for role in before:
        asked = role if isinstance(body, RerankRequest) and role in known else None
        before[role] = named_prompt(asked, model)
    if isinstance(body, RerankRequest) and body.truncate_prompt_tokens is None:
        body = body.model_copy(update={"truncate_prompt_tokens": -1})
    _check_no_limit(body)
    place: dict[str, int] = {}
    for text in (*(before["query"] + each for each in firsts), *(before["document"] + each for each in seconds)):
        place.setdefault(text, len(place))
    check_count(len(place), names[1])
    prompts = text_ids(body, list(place), model, names[1])
    pairs = [
        (place[before["query"] + first], place[before["document"] + second])
        for first, second in zip(firsts, seconds, strict=True)
    ]
    return prompts, [PoolingParams(activation=True)] * len(prompts), pairs


def _judged(
    body: PairBody, firsts: Sequence[str], seconds: Sequence[str], names: tuple[str, str], model: ServedModel
) -> Inputs:
    """Prompts of Qwen3-Reranker. What is too long loses the end of its document."""
    _check_no_limit(body)
    limit = _pair_limit(body, model)
    for text in dict.fromkeys(firsts):
        check_fits(model, text, names[0])
    for text in dict.fromkeys(seconds if limit is None else ()):
        check_fits(model, text, names[1])
    prompts = encode_judged(model.tokenizer, list(zip(firsts, seconds, strict=True)), body.instruction, limit)
    for ids in prompts:
        check_vector_length(ids, model, names[1])
    return prompts, [PoolingParams(task="classify", activation=body.activation)] * len(prompts), None
