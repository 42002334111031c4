"""From SGLang's label scores to completions of no token, whose answer is the probabilities of the next token."""

from __future__ import annotations

from dataclasses import replace

from quire.engine.errors import InvalidRequest
from quire.server.config import ServerConfig
from quire.server.generation.answers.decisions import LabelScoresWriter
from quire.server.generation.spec import Question
from quire.server.generation.vectors import VectorSpec
from quire.server.protocol.bounds import MAX_ENTRIES
from quire.server.protocol.completions import CompletionRequest
from quire.server.protocol.questions.label_scores import LabelScoreRequest
from quire.server.resolve.common import Resolved
from quire.server.resolve.completions import completion_call
from quire.server.resolve.pairs import resolve_score
from quire.server.resolve.parse import read_object, validated
from quire.server.resolve.translated.as_chat import in_own_words, named_by_caller
from quire.server.served_model import ServedModel

NAMES = {"prompt": "items", "logprob_token_ids": "label_token_ids"}


def resolve_scores(given: bytes, model: ServedModel, config: ServerConfig) -> VectorSpec | Resolved:
    """A body with label_token_ids is SGLang's, all others are vLLM's. Raises ModelNotFound, and InvalidRequest naming
    the parameter."""
    body = read_object(given)
    if body.get("label_token_ids") is None:
        return resolve_score(given, model, config)
    return label_scores(validated(body, LabelScoreRequest), model, config)


def label_scores(body: LabelScoreRequest, model: ServedModel, config: ServerConfig) -> Resolved:
    """Raises as above."""
    items = [body.items] if isinstance(body.items, str) else body.items
    if len(items) * len(body.query) + sum(map(len, items)) > MAX_ENTRIES:
        raise InvalidRequest("items: too many behind so long a query: ask for fewer at once", param="items")
    prompts: list[str | list[int]] = []
    for item in items:
        if isinstance(item, str) and isinstance(body.query, str):
            prompts.append(item + body.query if body.item_first else body.query + item)
        elif isinstance(item, list) and isinstance(body.query, list):
            prompts.append([*item, *body.query] if body.item_first else [*body.query, *item])
        else:
            raise InvalidRequest("items must be texts where the query is one, and else token ids", param="items")
    asked = {"prompt": prompts, "logprob_token_ids": body.label_token_ids, "logprobs": 0}
    asked |= {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    with named_by_caller(NAMES):
        call = completion_call(
            validated({**asked, **body.same}, CompletionRequest),
            model,
            config,
            writer=LabelScoresWriter,
            ignored=body.ignored_params(),
        )
    question = Question("shares" if body.apply_softmax else "labels", None, (), body.label_token_ids)
    spec = replace(call.spec, questions=[question])
    return in_own_words(replace(call, spec=spec, receipts=False), NAMES)
