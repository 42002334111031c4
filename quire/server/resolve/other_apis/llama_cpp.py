from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from quire.engine.common.errors import InvalidRequest
from quire.engine.text.tokenizer import Tokenizer
from quire.server.config import ServerConfig
from quire.server.generation.resolved_request import LineRule
from quire.server.generation.response_writers.llama_cpp import RANDOM_SEED, LlamaCppFields, LlamaCppWriter
from quire.server.protocol.completions import CompletionRequest
from quire.server.protocol.llama_cpp import (
    INFILL_SAMPLER_MIN_P,
    KNOWN_SAMPLERS,
    SAMPLER_FIELDS,
    InfillRequest,
    LlamaCppBody,
    LlamaCppCompletionRequest,
)
from quire.server.resolve.checks import check_no_surrogates, check_token_ids
from quire.server.resolve.completions import resolve_completion_request
from quire.server.resolve.other_apis.chat_conversion import rename_fields_in_raised_errors
from quire.server.resolve.other_apis.infill_prompt import build_infill_prompt, infill_end_token_ids
from quire.server.resolve.parse import parse_body, validate_body
from quire.server.resolve.resolved_generation import AnswerForm, ResolvedGeneration
from quire.server.served_model import ServedModel

FIELD_NAMES = {
    "max_tokens": "n_predict",
    "n": "n_cmpl",
    "repetition_penalty": "repeat_penalty",
    "logprobs": "n_probs",
}
NEVER_BIAS = -100.0
_TOKEN_ID = re.compile(r"[0-9]{1,18}")
COPIED_FIELDS = (
    "timeout",
    "queue_timeout",
    "request_id",
    "cache_salt",
    "priority",
    "stop",
    "stream",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "xtc_threshold",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
)


def resolve_llama_cpp_completion(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> ResolvedGeneration:
    body = parse_body(body_bytes, LlamaCppCompletionRequest)
    if isinstance(body.prompt, list):
        check_token_ids(body.prompt, model.vocab_size, "prompt")
    return _resolve(body, body.prompt, (), model, config)


def resolve_infill(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> ResolvedGeneration:
    body = parse_body(body_bytes, InfillRequest)
    ids = build_infill_prompt(body, model)
    return _resolve(body, ids, infill_end_token_ids(model), model, config)


def _resolve(
    body: LlamaCppBody, prompt: str | list[int], end_ids: Sequence[int], model: ServedModel, config: ServerConfig
) -> ResolvedGeneration:
    names = {**FIELD_NAMES, "structured_outputs": "grammar" if body.grammar else "json_schema"}
    writer = partial(LlamaCppWriter, _answer_fields(body, prompt, model))
    with rename_fields_in_raised_errors(names):
        request = validate_body(
            {
                **{name: getattr(body, name) for name in COPIED_FIELDS},
                **_sampler_fields(body),
                "model": body.model,
                "prompt": prompt,
                "max_tokens": body.num_tokens,
                "n": body.n_cmpl,
                "repetition_penalty": body.repeat_penalty,
                "seed": None if body.seed in (None, -1, RANDOM_SEED) else body.seed,
                "logit_bias": _token_biases(body, model.tokenizer),
                "logprobs": body.n_probs or None,
                "stop_token_ids": end_ids,
                "return_token_ids": True,
                "structured_outputs": _structured_outputs(body),
            },
            CompletionRequest,
        )
        return resolve_completion_request(
            request,
            model,
            config,
            AnswerForm(writer, "cmpl-", names),
            ignored=body.check_params_and_list_ignored(),
            allows_no_tokens=True,
            line_rule=_line_rule(body),
        )


def _answer_fields(body: LlamaCppBody, prompt: str | list[int], model: ServedModel) -> LlamaCppFields:
    active_samplers = SAMPLER_FIELDS if body.samplers is None else body.samplers
    text: str | None = None
    if body.response_fields is None or "prompt" in body.response_fields:
        text = prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt, skip_special_tokens=False)
    return LlamaCppFields(
        context_length=model.context_length,
        samplers=[name for name in KNOWN_SAMPLERS if name in active_samplers],
        prompt=text,
        response_fields=body.response_fields,
        return_tokens=body.return_tokens,
    )


def _line_rule(body: LlamaCppBody) -> LineRule | None:
    if not body.n_indent and body.t_max_predict_ms <= 0:
        return None
    return LineRule(body.n_indent, body.t_max_predict_ms / 1e3 if body.t_max_predict_ms > 0 else None)


def _sampler_fields(body: LlamaCppBody) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for sampler, (name, neutral) in SAMPLER_FIELDS.items():
        applies = body.samplers is None or sampler in body.samplers
        fields[name] = getattr(body, name) if applies else neutral
    if "infill" in (body.samplers or ()):
        fields["min_p"] = max(fields["min_p"] or 0.0, INFILL_SAMPLER_MIN_P)
    return fields


def _structured_outputs(body: LlamaCppBody) -> dict[str, Any] | None:
    if body.grammar and body.json_schema is not None:
        raise InvalidRequest("grammar and json_schema cannot be combined", param="grammar")
    if body.grammar:
        return {"grammar": body.grammar}
    return None if body.json_schema is None else {"json": body.json_schema}


def _token_biases(body: LlamaCppBody, tokenizer: Tokenizer) -> dict[int, float] | None:
    """A text's bias applies to each of its tokens."""
    if body.logit_bias is None:
        return None
    pairs = body.logit_bias.items() if isinstance(body.logit_bias, dict) else body.logit_bias
    biases: dict[int, float] = {}
    for token, bias in pairs:
        if isinstance(token, int) or (isinstance(body.logit_bias, dict) and _TOKEN_ID.fullmatch(token)):
            ids = [int(token)]
        else:
            check_no_surrogates(token, "logit_bias")
            ids = tokenizer.encode(token, add_special_tokens=False)
        biases |= dict.fromkeys(ids, NEVER_BIAS if bias is False else float(bias))
    return biases
