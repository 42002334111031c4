"""Checks of single values. All raise InvalidRequest."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from quire.engine.common.errors import ContextLengthExceeded, InvalidRequest
from quire.engine.common.request_params import Grammar, SamplingParams
from quire.server.protocol.field_limits import MAX_COPIED_PARAMS_SIZE

MAX_PROMPT_LOGPROBS = 100_000


class NeedsWorker(Exception):
    """Raised for work that only a worker may do, because workers can be killed."""


def check_logprobs(name: str, value: int | None, max_logprobs: int, vocab_size: int) -> None:
    """`max_logprobs` -1 allows the whole vocabulary."""
    most = vocab_size if max_logprobs == -1 else max_logprobs
    if value is not None and value > most:
        raise InvalidRequest(f"{name} must be at most {most}, got {value}", param=name)


def check_total_prompt_logprobs(alternatives: int | None, num_tokens: int) -> None:
    """`num_tokens` counts all prompts, because the engine sends their log probabilities in one message."""
    if alternatives is not None and num_tokens * max(1, alternatives) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs (or logprobs with echo) of {num_tokens} prompt tokens with {alternatives} alternatives "
            f"each are more than {MAX_PROMPT_LOGPROBS}: ask for fewer, or send shorter prompts",
            param="prompt_logprobs",
        )


def copied_param_sizes(params: SamplingParams, grammar: Grammar | None) -> dict[str, int]:
    """Returns the number of token ids per answer, keyed by field. 16 characters of a grammar count as one id."""
    return {
        "logit_bias": len(params.logit_bias or ()),
        "stop_token_ids": len(params.stop_token_ids),
        "allowed_token_ids": len(params.allowed_token_ids or ()),
        "bad_words": sum(map(len, params.bad_words_ids)),
        "dry_sequence_breakers": sum(map(len, params.dry_sequence_breaker_ids)),
        "grammar": 0 if grammar is None else len(grammar.text) // 16,
    }


def check_copied_params_size(params: SamplingParams, grammar: Grammar | None, num_answers: int) -> None:
    """Limits all answers together, because each sends a copy to the engine."""
    sizes = copied_param_sizes(params, grammar)
    if sum(sizes.values()) * num_answers > MAX_COPIED_PARAMS_SIZE:
        most = max(sizes, key=lambda name: sizes[name])
        name = "structured_outputs" if most == "grammar" else most
        raise InvalidRequest(f"{name} is too large for {num_answers} answers: ask for fewer at once", param=name)


def check_token_ids(ids: Collection[int], vocab_size: int, param: str) -> None:
    for token_id in (min(ids), max(ids)) if ids else ():
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{param}: token id {token_id} is out of vocabulary (0 to {vocab_size - 1})",
                param=param,
            )


def check_no_surrogates(text: str, param: str) -> None:
    """JSON can spell half a surrogate pair, which UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"{param} contains half of a surrogate pair, which is not a character", param=param
        ) from None


def check_json_no_surrogates(value: Any, param: str) -> None:
    check_no_surrogates(json.dumps(value, ensure_ascii=False), param)


def check_prompt_length(ids: Sequence[int], max_model_len: int, param: str) -> None:
    if not ids:
        raise InvalidRequest(f"{param} cannot be empty", param=param)
    if len(ids) >= max_model_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens, but {param} came to {len(ids)} tokens, "
            "which leaves no room for an answer. Please shorten it",
            param=param,
        )
