from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import COPIED_SAMPLING_FIELDS, SamplingParams
from quire.engine.text.token_sequences.bad_words import bad_words_ids, check_allowed_tokens_remain
from quire.engine.text.token_sequences.sequence_breakers import sequence_breaker_ids
from quire.server.config import ServerConfig
from quire.server.protocol.request_bodies import GenerationBody
from quire.server.resolve.checks import NeedsWorker, check_no_surrogates, check_token_ids
from quire.server.served_model import ServedModel

CLIPPED_HEADER = "X-Max-Tokens-Clipped"
"""Header with the context length, sent if max_tokens exceeds it."""


def resolve_sampling_params(
    body: GenerationBody,
    model: ServedModel,
    config: ServerConfig,
    *,
    max_tokens: int | None,
    max_tokens_name: str = "max_tokens",
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Defaults are the model's. Raises InvalidRequest, NeedsWorker."""
    model.check_task("generate")
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
    _check_no_surrogates_in(
        stop=stop,
        cache_salt=[body.cache_salt],
        session_id=[body.session_id],
        bad_words=body.bad_words,
        dry_sequence_breakers=body.dry_sequence_breakers or (),
    )
    params = SamplingParams(
        n=body.n,
        **_copied_fields(body, model.default_sampling),
        logit_bias=body.logit_bias or None,
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        bad_words_ids=bad_words_ids(body.bad_words, model.tokenizer) if body.bad_words else (),
        max_tokens=_limit_max_tokens(max_tokens, max_tokens_name, model.context_length, clip=config.clip_max_tokens),
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids),
        seed=body.seed,
        logprobs=logprobs,
        logprob_token_ids=tuple(body.logprob_token_ids) or None,
        prompt_logprobs=prompt_logprobs,
    )
    if params.allowed_token_ids is not None:
        check_allowed_tokens_remain(params, model.tokenizer.eos_token_ids)
    if params.has_dry:
        if not model.expendable and body.dry_sequence_breakers != []:
            raise NeedsWorker  # searches the texts of the whole vocabulary
        breaker_ids = sequence_breaker_ids(body.dry_sequence_breakers, model.tokenizer)
        params = msgspec.structs.replace(params, dry_sequence_breaker_ids=breaker_ids)
    return params


def _limit_max_tokens(max_tokens: int | None, name: str, context: int, *, clip: bool) -> int | None:
    """Returns None for None, which means as many as the context holds."""
    if max_tokens is None:
        return None
    if max_tokens > context and not clip:
        raise InvalidRequest(
            f"{name} is too large: {max_tokens}. This model's context is {context} tokens, prompt and answer together",
            param=name,
        )
    return min(max_tokens, context)


def clipped_header(max_tokens: int | None, model: ServedModel) -> dict[str, str]:
    most = model.context_length
    return {CLIPPED_HEADER: str(most)} if max_tokens is not None and max_tokens > most else {}


def _check_no_surrogates_in(**texts: Sequence[str]) -> None:
    for name, several in texts.items():
        for text in several:
            check_no_surrogates(text, name)


def _copied_fields(body: GenerationBody, model_defaults: Mapping[str, float]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for row in COPIED_SAMPLING_FIELDS:
        value = getattr(body, row.name)
        if value is None:
            value = model_defaults[row.name]
        values[row.name] = int(value) if row.type is int else value
    return values
