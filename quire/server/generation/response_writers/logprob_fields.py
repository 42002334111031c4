from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quire.engine.common.types import TokenLogprob
from quire.engine.text.tokenizer import Tokenizer
from quire.server.generation.choice_state import AnswerToken

MIN_LOGPROB = -9999.0
"""Replaces -inf, which JSON lacks, as in vLLM."""


TokenNamer = Callable[[int], str]


def completion_logprobs(
    tokens: Sequence[AnswerToken], tokenizer: Tokenizer, *, as_token_ids: bool = False
) -> dict[str, Any]:
    """As in vLLM, top_logprobs begins with the sampled token."""
    name = token_id_name if as_token_ids else tokenizer.token_display_text
    return {
        "tokens": [name(token.token_id) for token in tokens],
        "token_logprobs": [
            None if token.logprob is None else _clamp_to_finite(token.logprob.logprob) for token in tokens
        ],
        "top_logprobs": [None if token.logprob is None else _logprobs_by_name(token.logprob, name) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def chat_logprobs(tokens: Sequence[AnswerToken], tokenizer: Tokenizer, *, as_token_ids: bool = False) -> dict[str, Any]:
    name = token_id_name if as_token_ids else tokenizer.token_display_text
    content = []
    for token in tokens:
        assert token.logprob is not None, "only echoed prompts have tokens without one"
        top = [_token_logprob_fields(token_id, logprob, tokenizer, name) for token_id, logprob in token.logprob.top]
        content.append(
            {**_token_logprob_fields(token.token_id, token.logprob.logprob, tokenizer, name), "top_logprobs": top}
        )
    return {"content": content, "refusal": None}


def prompt_logprobs(
    logprobs: Sequence[TokenLogprob | None], tokenizer: Tokenizer
) -> list[dict[str, dict[str, Any]] | None]:
    """As in vLLM, the dicts are keyed by token id, and the first token has None."""
    return [None if each is None else _logprobs_by_token_id(each, tokenizer) for each in logprobs]


def token_id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _logprobs_by_token_id(logprob: TokenLogprob, tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    ranked = {logprob.token_id: (logprob.logprob, logprob.rank)}
    for rank, (token_id, value) in enumerate(logprob.top, 1):
        ranked.setdefault(token_id, (value, rank))
    return {
        str(token_id): {
            "logprob": _clamp_to_finite(value),
            "rank": rank,
            "decoded_token": tokenizer.token_display_text(token_id),
        }
        for token_id, (value, rank) in ranked.items()
    }


def _logprobs_by_name(logprob: TokenLogprob, name: TokenNamer) -> dict[str, float]:
    entries: dict[str, float] = {}
    for token_id, value in [(logprob.token_id, logprob.logprob), *logprob.top]:
        entries.setdefault(name(token_id), _clamp_to_finite(value))
    return entries


def _token_logprob_fields(token_id: int, logprob: float, tokenizer: Tokenizer, name: TokenNamer) -> dict[str, Any]:
    return {
        "token": name(token_id),
        "logprob": _clamp_to_finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _clamp_to_finite(value: float) -> float:
    return max(value, MIN_LOGPROB)
