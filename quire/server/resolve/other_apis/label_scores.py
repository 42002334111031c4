from __future__ import annotations

from quire.engine.common.errors import InvalidRequest
from quire.server.config import ServerConfig
from quire.server.generation.resolved_request import OptionQuestion
from quire.server.generation.response_writers.decisions import LabelScoresWriter
from quire.server.generation.vector_generation import VectorRequest
from quire.server.protocol.completions import CompletionRequest
from quire.server.protocol.field_limits import MAX_PROMPT_ENTRIES
from quire.server.protocol.questions.label_scores import LabelScoreRequest
from quire.server.resolve.completions import resolve_completion_request
from quire.server.resolve.other_apis.chat_conversion import rename_fields_in_raised_errors
from quire.server.resolve.parse import read_json_object, validate_body
from quire.server.resolve.resolved_generation import AnswerForm, ResolvedGeneration
from quire.server.resolve.text_pairs import resolve_score
from quire.server.served_model import ServedModel

LABEL_SCORE_FIELD_NAMES = {"prompt": "items", "logprob_token_ids": "label_token_ids"}
LABEL_SCORES_FORM = AnswerForm(LabelScoresWriter, "cmpl-", LABEL_SCORE_FIELD_NAMES, allows_receipt=False)


def resolve_score_or_label_scores(
    body_bytes: bytes, model: ServedModel, config: ServerConfig
) -> VectorRequest | ResolvedGeneration:
    """With label_token_ids, the body is SGLang's, otherwise vLLM's."""
    body = read_json_object(body_bytes)
    if body.get("label_token_ids") is None:
        return resolve_score(body_bytes, model, config)
    return resolve_label_scores(validate_body(body, LabelScoreRequest), model, config)


def resolve_label_scores(body: LabelScoreRequest, model: ServedModel, config: ServerConfig) -> ResolvedGeneration:
    items = [body.items] if isinstance(body.items, str) else body.items
    if len(items) * len(body.query) + sum(map(len, items)) > MAX_PROMPT_ENTRIES:
        raise InvalidRequest("items: too many for a query of this length: send fewer at once", param="items")
    prompts: list[str | list[int]] = []
    for item in items:
        if isinstance(item, str) and isinstance(body.query, str):
            prompts.append(item + body.query if body.item_first else body.query + item)
        elif isinstance(item, list) and isinstance(body.query, list):
            prompts.append([*item, *body.query] if body.item_first else [*body.query, *item])
        else:
            raise InvalidRequest("items must be texts if the query is a text, otherwise token ids", param="items")
    fields = {"prompt": prompts, "logprob_token_ids": body.label_token_ids, "logprobs": 0}
    fields |= {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    question = OptionQuestion("shares" if body.apply_softmax else "labels", None, (), body.label_token_ids)
    with rename_fields_in_raised_errors(LABEL_SCORE_FIELD_NAMES):
        return resolve_completion_request(
            validate_body({**fields, **body.engine_request_fields}, CompletionRequest),
            model,
            config,
            LABEL_SCORES_FORM,
            ignored=body.check_params_and_list_ignored(),
            questions=[question],
        )
