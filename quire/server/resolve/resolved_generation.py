from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import Grammar, SamplingParams
from quire.engine.text.grammar_compiler import MAX_GRAMMAR_BYTES
from quire.server.cache_diagnostics import PromptFingerprint
from quire.server.config import ServerConfig
from quire.server.formats.message_parser import RequestMessageFormat
from quire.server.generation.resolved_request import (
    CheckedGrammar,
    GenerationRequest,
    LineRule,
    OptionQuestion,
    Prompt,
    RepetitionRule,
    ResponsesApiFields,
)
from quire.server.generation.response_writers.answer_writer import WriterFactory
from quire.server.protocol.request_bodies import GenerationBody
from quire.server.resolve.answer_grammar import AnswerGrammar
from quire.server.resolve.checks import check_copied_params_size, check_total_prompt_logprobs
from quire.server.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class AnswerForm:
    writer: WriterFactory
    id_prefix: str
    field_names: Mapping[str, str] = field(default_factory=dict)
    """Maps a chat's or completion's names to the API's."""
    allows_receipt: bool = True


@dataclass(frozen=True, slots=True)
class ResolvedGeneration:
    """It can run once its grammars compile."""

    request: GenerationRequest
    form: AnswerForm
    grammars: Sequence[tuple[str, Grammar]] = ()
    """They are checked in this order; answers match the last one."""
    answer_grammar: AnswerGrammar | None = None
    """Makes the last grammar; None if it cannot be weakened."""
    schema_headers: Mapping[str, str] = field(default_factory=dict)

    def with_responses_fields(self, fields: ResponsesApiFields, *, prompt_only: bool) -> ResolvedGeneration:
        assert self.request.responses_fields is None, "resolved once"
        return replace(self, request=replace(self.request, responses_fields=fields, prompt_only=prompt_only))

    def with_fingerprint(self, fingerprint: PromptFingerprint | None, comparison_id: str | None) -> ResolvedGeneration:
        return replace(self, request=replace(self.request, fingerprint=fingerprint, comparison_id=comparison_id or ""))

    @property
    def unchecked_grammar(self) -> CheckedGrammar:
        """The last grammar, after the checker has accepted it."""
        param, grammar = self.grammars[-1]
        return CheckedGrammar(param, grammar, self.schema_headers)

    def build_weaker_grammar(self, weaker: AnswerGrammar, model: ServedModel) -> CheckedGrammar:
        param, grammar = weaker.build_grammars(model)[-1]
        check_grammar_length(param, grammar)
        return CheckedGrammar(self.form.field_names.get(param, param), grammar, weaker.schema_headers())


def build_generation(  # noqa: PLR0913 (the fields of a request that its body alone does not give)
    body: GenerationBody,
    form: AnswerForm,
    config: ServerConfig,
    *,
    model: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    logprobs: bool,
    headers: Mapping[str, str],
    message: RequestMessageFormat | None = None,
    echo: bool = False,
    prompt_only: bool = False,
    line_rule: LineRule | None = None,
    questions: Sequence[OptionQuestion] = (),
    grammars: Sequence[tuple[str, Grammar]] = (),
    answer_grammar: AnswerGrammar | None = None,
    schema_headers: Mapping[str, str] | None = None,
) -> ResolvedGeneration:
    """`model`: the answer's. Raises InvalidRequest for beam search with a grammar, and for too large prompt logprobs or
    copied parameters.
    """
    check_total_prompt_logprobs(params.prompt_logprobs, sum(len(prompt.ids) for prompt in prompts))
    for param, grammar in grammars:
        check_grammar_length(param, grammar)
    check_copied_params_size(params, grammars[-1][1] if grammars else None, len(prompts) * params.n)
    if body.use_beam_search and grammars:
        message_text = "use_beam_search is not available together with structured outputs"
        raise InvalidRequest(message_text, param="use_beam_search")
    rule = body.repetition_detection
    request = GenerationRequest(
        id_prefix=form.id_prefix,
        body_id="" if body.request_id is None else f"{form.id_prefix}{body.request_id}",
        model=model,
        prompts=prompts,
        params=params,
        num_returned=body.n,
        body_priority=body.priority,
        body_cache_salt=body.cache_salt,
        session_id=body.session_id,
        keep_seconds=body.prompt_cache_retention_seconds,
        timeout=body.timeout,
        queue_timeout=body.queue_timeout,
        beam_search=body.use_beam_search,
        length_penalty=body.length_penalty,
        repetition_rule=(
            None if rule is None else RepetitionRule(rule.max_pattern_size, rule.min_pattern_size, rule.min_count)
        ),
        message_format=message,
        stream=body.stream,
        include_usage=body.include_usage,
        continuous_usage=body.has_continuous_usage,
        echo=echo,
        prompt_only=prompt_only,
        line_rule=line_rule,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        return_token_ids=body.return_token_ids,
        return_tokens_as_token_ids=body.return_tokens_as_token_ids or config.return_tokens_as_token_ids,
        include_metrics=config.enable_per_request_metrics and len(prompts) * params.n == 1,
        body_receipt=body.receipt,
        allows_receipt=form.allows_receipt,
        questions=questions,
        headers=headers,
    )
    caller_grammars = [(form.field_names.get(param, param), grammar) for param, grammar in grammars]
    return ResolvedGeneration(request, form, caller_grammars, answer_grammar, schema_headers or {})


def check_grammar_length(param: str, grammar: Grammar) -> None:
    if len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{param} is longer than {MAX_GRAMMAR_BYTES} bytes", param=param)
