from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.engine.common.errors import InvalidRequest
from quire.engine.text.null_tokenizer import check_text_params
from quire.server.config import ServerConfig
from quire.server.generation.resolved_request import LineRule, OptionQuestion
from quire.server.generation.response_writers.completion_chunks import CompletionWriter
from quire.server.protocol.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from quire.server.protocol.request_bodies import ignored_params_header
from quire.server.resolve.answer_grammar import AnswerGrammar
from quire.server.resolve.checks import check_logprobs
from quire.server.resolve.parse import parse_body
from quire.server.resolve.prompts import build_completion_prompts
from quire.server.resolve.requested_grammar import requested_grammar
from quire.server.resolve.resolved_generation import (
    AnswerForm,
    AnswerOptions,
    RequestGrammars,
    ResolvedGeneration,
    build_generation,
)
from quire.server.resolve.sampling_fields import clipped_header, resolve_sampling_params
from quire.server.resolve.tool_use import RequestTools
from quire.server.served_model import ServedModel

COMPLETION_FORM = AnswerForm(CompletionWriter, "cmpl-")


def resolve_completion(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> ResolvedGeneration:
    return resolve_completion_request(parse_body(body_bytes, CompletionRequest), model, config)


def resolve_completion_request(
    body: CompletionRequest,
    model: ServedModel,
    config: ServerConfig,
    form: AnswerForm = COMPLETION_FORM,
    *,
    ignored: Sequence[str] = (),
    questions: Sequence[OptionQuestion] = (),
    allows_no_tokens: bool = False,
    line_rule: LineRule | None = None,
) -> ResolvedGeneration:
    """`allows_no_tokens`: max_tokens 0 only computes the prompt into the prefix cache."""
    name = model.resolve_model_name(body.model)
    headers = ignored_params_header([*ignored, *body.check_params_and_list_ignored()], config.strict)
    check_logprobs("logprobs", body.logprobs, config.max_logprobs, model.vocab_size)
    check_logprobs("prompt_logprobs", body.prompt_logprobs, config.max_logprobs, model.vocab_size)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    headers |= clipped_header(max_tokens, model)
    prompt_only = max_tokens == 0 and (body.echo or allows_no_tokens)
    if prompt_only and body.logprob_token_ids:
        message = "logprob_token_ids applies to generated tokens, and echo with max_tokens 0 generates none"
        raise InvalidRequest(message, param="logprob_token_ids")
    params = resolve_sampling_params(
        body,
        model,
        config,
        max_tokens=1 if prompt_only else max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=_max_or_none(body.prompt_logprobs, body.logprobs if body.echo else None),
    )
    if body.num_candidates > body.n:
        params = msgspec.structs.replace(params, n=body.num_candidates, logprobs=body.logprobs or 0)
    requested_format = requested_grammar(body, config, model.tokenizer)
    answer = AnswerGrammar(RequestTools(), requested_format, has_content_delimiters=False)
    check_text_params(model.tokenizer, stop=params.stop, structured_outputs=requested_format)
    prompts = build_completion_prompts(body, model)
    options = AnswerOptions(
        headers=headers,
        logprobs=body.logprobs is not None,
        echo=body.echo,
        prompt_only=prompt_only,
        line_rule=line_rule,
        questions=questions,
    )
    grammars = RequestGrammars(to_check=answer.build_grammars(model), schema_headers=answer.schema_headers())
    return build_generation(body, form, config, name, prompts, params, options, grammars)


def _max_or_none(*counts: int | None) -> int | None:
    return max((count for count in counts if count is not None), default=None)
