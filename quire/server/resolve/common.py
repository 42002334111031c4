"""What all endpoints that generate text resolve alike: the fields that completions and chat share."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict, TypeVar

import msgspec

from quire.engine.common import random_source
from quire.engine.common.errors import InvalidRequest
from quire.engine.common.types import Grammar, SamplingParams
from quire.engine.text.bad_words import bad_words_ids, check_allowed_tokens_remain
from quire.engine.text.grammar_compiler import MAX_GRAMMAR_BYTES
from quire.server.config import ServerConfig
from quire.server.formats.message_parser import RequestMessageFormat
from quire.server.generation.request_specs import GenerationSpec, Prompt, RepetitionRule
from quire.server.generation.response_writers.answer_writer import WriterFactory
from quire.server.generation.vector_generation import VectorSpec
from quire.server.protocol.request_bodies import GenerationBody
from quire.server.resolve.answer_grammar import AnswerGrammar
from quire.server.resolve.checks import (
    check_copied_params_size,
    check_no_surrogates,
    check_token_ids,
    check_total_prompt_logprobs,
    copied_param_sizes,
)
from quire.server.served_model import ServedModel

Made = TypeVar("Made")
CLIPPED = "X-Max-Tokens-Clipped"
"""The header with the tokens that an answer may have, where the request asked for more than the context holds."""
BYTES_OF_ID = 32
"""That a list's entry takes beyond what it takes in a message."""


class _Ids(TypedDict):
    """Fields of a GenerationSpec."""

    id: str
    id_prefix: str
    requested_id: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """A resolved call, which can run once its grammars are known to compile."""

    spec: GenerationSpec
    """Without its tenant, whom only the server's own process knows."""
    writer: WriterFactory
    """Writes the answer in the form of the API that was asked."""
    grammars: Sequence[tuple[str, Grammar]] = ()
    """To be checked, in this order, each with the parameter that an error names."""
    answer: AnswerGrammar | None = None
    """What the last grammar is made of."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The caller's names of fields, by those of a chat."""
    receipts: bool = True
    """Whether the answer can have a receipt: not where nothing is generated that anybody reads."""


def measured(
    given: bytes, model: ServedModel, config: ServerConfig, *, work: Callable[[bytes, ServedModel, ServerConfig], Made]
) -> tuple[Made, int]:
    """What `work` makes of a body, and its size in bytes, without prompts' token ids: the queue bounds those."""
    made = work(given, model, config)
    kept: object = made
    ids = pixels = 0
    if isinstance(made, Resolved):
        ids = sum(copied_param_sizes(made.spec.params).values())
        pixels = sum(len(image.pixels) for prompt in made.spec.prompts for image in prompt.images)
        prompts = [replace(prompt, ids=[], images=()) for prompt in made.spec.prompts]
        kept = replace(made, spec=replace(made.spec, prompts=prompts))
    elif isinstance(made, VectorSpec):
        pixels = sum(len(image.pixels) for each in made.inputs for image in each.images)
        kept = replace(made, inputs=())
    return made, len(pickle.dumps(kept, pickle.HIGHEST_PROTOCOL)) + BYTES_OF_ID * ids + pixels


def resolved(  # noqa: PLR0913 (dissolves into the pipeline of requests)
    body: GenerationBody,
    *,
    writer: WriterFactory,
    id_prefix: str,
    model: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    logprobs: bool,
    headers: Mapping[str, str],
    config: ServerConfig,
    message: RequestMessageFormat | None = None,
    echo: bool = False,
    echo_only: bool = False,
    grammars: Sequence[tuple[str, Grammar]] = (),
    answer: AnswerGrammar | None = None,
) -> Resolved:
    """The spec of a body whose prompts and parameters are resolved; `model` is the name for the answer. The last of
    `grammars` is the answers', made of `answer`.

    Raises InvalidRequest for beam search with a grammar, for log probabilities of too long prompts, and for more lists
    of token ids than the answers may carry.
    """
    check_total_prompt_logprobs(params.prompt_logprobs, sum(len(prompt.ids) for prompt in prompts))
    _check_grammars(grammars)
    if grammars:
        params = msgspec.structs.replace(params, grammar=grammars[-1][1])
    check_copied_params_size(params, len(prompts) * params.n)
    _check_beam_search(body, params)
    spec = GenerationSpec(
        **_ids(body, id_prefix),
        model=model,
        prompts=prompts,
        params=params,
        num_returned=body.n,
        priority=body.priority,
        cache_salt=body.cache_salt,
        session_id=body.session_id,
        keep_seconds=body.prompt_cache_retention_seconds,
        timeout=body.timeout,
        queue_timeout=body.queue_timeout,
        beam_search=body.use_beam_search,
        length_penalty=body.length_penalty,
        repetition_rule=_repetition(body),
        message_format=message,
        stream=body.stream,
        include_usage=body.include_usage,
        continuous_usage=body.has_continuous_usage,
        echo=echo,
        echo_only=echo_only,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        return_token_ids=body.return_token_ids,
        return_tokens_as_token_ids=body.return_tokens_as_token_ids or config.return_tokens_as_token_ids,
        include_metrics=config.enable_per_request_metrics and len(prompts) * params.n == 1,
        include_receipt=body.receipt,
        headers=headers,
    )
    return Resolved(spec, writer, grammars, answer)


def with_answer(call: Resolved, answer: AnswerGrammar, model: ServedModel) -> Resolved:
    """The call with another grammar of its answer. Raises InvalidRequest."""
    grammars = [(call.names.get(param, param), grammar) for param, grammar in answer.build_grammars(model)]
    _check_grammars(grammars)
    params = msgspec.structs.replace(call.spec.params, grammar=grammars[-1][1])
    spec = replace(call.spec, params=params, headers={**call.spec.headers, **answer.schema_headers()})
    return replace(call, spec=spec, grammars=grammars, answer=answer)


def _check_grammars(grammars: Sequence[tuple[str, Grammar]]) -> None:
    for param, grammar in grammars:
        if len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"{param} is longer than {MAX_GRAMMAR_BYTES} bytes", param=param)


def _check_beam_search(body: GenerationBody, params: SamplingParams) -> None:
    if body.use_beam_search and params.grammar is not None:
        message = "use_beam_search is not available together with structured outputs"
        raise InvalidRequest(message, param="use_beam_search")


def _ids(body: GenerationBody, prefix: str) -> _Ids:
    """Of the answer: ours, how both begin, and the one that its caller chose."""
    chosen = "" if body.request_id is None else f"{prefix}{body.request_id}"
    return _Ids(id=f"{prefix}{random_source.token_hex(16)}", id_prefix=prefix, requested_id=chosen)


def _repetition(body: GenerationBody) -> RepetitionRule | None:
    rule = body.repetition_detection
    return None if rule is None else RepetitionRule(rule.max_pattern_size, rule.min_pattern_size, rule.min_count)


def sampling_params(
    body: GenerationBody,
    model: ServedModel,
    config: ServerConfig,
    *,
    max_tokens: int | None,
    max_tokens_name: str = "max_tokens",
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The body's values, by default those of the model's generation_config.json.

    Raises InvalidRequest naming the parameter.
    """
    model.check_task("generate")
    defaults = model.default_sampling
    if max_tokens == -1:
        max_tokens = None
    if (most := model.max_output_tokens) is not None:
        max_tokens = most if max_tokens is None else min(max_tokens, most)
    for name, ids in (
        ("logit_bias", body.logit_bias),
        ("stop_token_ids", body.stop_token_ids),
        ("allowed_token_ids", body.allowed_token_ids),
        ("logprob_token_ids", body.logprob_token_ids),
    ):
        check_token_ids(ids or (), model.vocab_size, name)
    if body.logprob_token_ids and logprobs is None:
        raise InvalidRequest("logprob_token_ids needs logprobs", param="logprob_token_ids")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    _check_texts(stop=stop, cache_salt=[body.cache_salt], session_id=[body.session_id], bad_words=body.bad_words)
    params = SamplingParams(
        n=body.n,
        temperature=_first(body.temperature, defaults["temperature"]),
        top_p=_first(body.top_p, defaults["top_p"]),
        top_k=int(_first(body.top_k, defaults["top_k"])),
        min_p=_first(body.min_p, defaults["min_p"]),
        repetition_penalty=_first(body.repetition_penalty, defaults["repetition_penalty"]),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias or None,
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        bad_words_ids=bad_words_ids(body.bad_words, model.tokenizer),
        max_tokens=_limit(max_tokens, max_tokens_name, model.context_length, clip=config.clip_max_tokens),
        min_tokens=body.min_tokens,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        seed=body.seed,
        logprobs=logprobs,
        logprob_token_ids=tuple(body.logprob_token_ids) or None,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=body.skip_special_tokens,
        include_stop_str_in_output=body.include_stop_str_in_output,
    )
    check_allowed_tokens_remain(params, model.tokenizer.eos_token_ids)
    return params


def _limit(max_tokens: int | None, name: str, context: int, *, clip: bool) -> int | None:
    """Most tokens of an answer; None: as many as the context holds. Raises InvalidRequest for more, unless they are
    clipped."""
    if max_tokens is None:
        return None
    if max_tokens > context and not clip:
        raise InvalidRequest(
            f"{name} is too large: {max_tokens}. This model's context is {context} tokens, prompt and answer together",
            param=name,
        )
    return min(max_tokens, context)


def clipped_header(max_tokens: int | None, model: ServedModel) -> dict[str, str]:
    """The header of an answer that has less room than its request gave it."""
    most = model.context_length
    return {CLIPPED: str(most)} if max_tokens is not None and max_tokens > most else {}


def _check_texts(**texts: Sequence[str]) -> None:
    for name, several in texts.items():
        for text in several:
            check_no_surrogates(text, name)


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
