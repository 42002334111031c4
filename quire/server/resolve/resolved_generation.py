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
    """Maps the field names of a chat or completion to those of the API."""
    allows_receipt: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    headers: Mapping[str, str]
    """Response headers that the resolver adds."""
    logprobs: bool
    """The engine may compute log probabilities without this."""
    message_format: RequestMessageFormat | None = None
    """If None, all of a chat's text is content."""
    echo: bool = False
    prompt_only: bool = False
    line_rule: LineRule | None = None
    questions: Sequence[OptionQuestion] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestGrammars:
    to_check: Sequence[tuple[str, Grammar]] = ()
    """Pairs of a body's field, which errors name, and a grammar. They are checked in this order. Answers match the last
    grammar.
    """
    weakenable: AnswerGrammar | None = None
    """What the last grammar is made from, if a weaker one may replace it when it does not compile."""
    schema_headers: Mapping[str, str] = field(default_factory=dict)
    """Response headers that name schemas which the grammar does not enforce in full."""


@dataclass(frozen=True, slots=True)
class ResolvedGeneration:
    """A request that can run once its grammars compile."""

    request: GenerationRequest
    form: AnswerForm
    grammars: RequestGrammars

    def with_responses_fields(self, fields: ResponsesApiFields, *, prompt_only: bool) -> ResolvedGeneration:
        assert self.request.responses_fields is None, "resolved once"
        return replace(self, request=replace(self.request, responses_fields=fields, prompt_only=prompt_only))

    def with_fingerprint(self, fingerprint: PromptFingerprint | None, comparison_id: str | None) -> ResolvedGeneration:
        return replace(self, request=replace(self.request, fingerprint=fingerprint, comparison_id=comparison_id or ""))

    @property
    def unchecked_grammar(self) -> CheckedGrammar:
        """Only GrammarChecker may use this, after it has accepted the grammar."""
        param, grammar = self.grammars.to_check[-1]
        return CheckedGrammar(param, grammar, self.grammars.schema_headers)

    def build_weaker_grammar(self, weaker: AnswerGrammar, model: ServedModel) -> CheckedGrammar:
        param, grammar = weaker.build_grammars(model)[-1]
        check_grammar_length(param, grammar)
        return CheckedGrammar(self.form.field_names.get(param, param), grammar, weaker.schema_headers())


def build_generation(
    body: GenerationBody,
    form: AnswerForm,
    config: ServerConfig,
    model: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    options: AnswerOptions,
    grammars: RequestGrammars,
) -> ResolvedGeneration:
    """`model` is the name that the answer shows. Raises InvalidRequest for beam search with a grammar, and for prompt
    log probabilities or copied parameters that are too large.
    """
    to_check = grammars.to_check
    check_total_prompt_logprobs(params.prompt_logprobs, sum(len(prompt.ids) for prompt in prompts))
    for param, grammar in to_check:
        check_grammar_length(param, grammar)
    check_copied_params_size(params, to_check[-1][1] if to_check else None, len(prompts) * params.n)
    if body.use_beam_search and to_check:
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
        message_format=options.message_format,
        stream=body.stream,
        include_usage=body.include_usage,
        continuous_usage=body.has_continuous_usage,
        echo=options.echo,
        prompt_only=options.prompt_only,
        line_rule=options.line_rule,
        logprobs=options.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        return_token_ids=body.return_token_ids,
        return_tokens_as_token_ids=body.return_tokens_as_token_ids or config.return_tokens_as_token_ids,
        include_metrics=config.enable_per_request_metrics and len(prompts) * params.n == 1,
        body_receipt=body.receipt,
        allows_receipt=form.allows_receipt,
        questions=options.questions,
        headers=options.headers,
    )
    caller_grammars = [(form.field_names.get(param, param), grammar) for param, grammar in to_check]
    return ResolvedGeneration(request, form, replace(grammars, to_check=caller_grammars))


def check_grammar_length(param: str, grammar: Grammar) -> None:
    if len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{param} is longer than {MAX_GRAMMAR_BYTES} bytes", param=param)
