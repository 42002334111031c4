"""Log probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.tokenizer import Tokenizer
from engine.types import TokenLogprob
from server.generate import TokenText

LOWEST = -9999.0
"""JSON has no -inf; this is what vLLM writes for it."""


def completion_logprobs(tokens: Sequence[TokenText], tokenizer: Tokenizer) -> dict[str, Any]:
    """Four lists, one entry per token. The top ones hold the picked token too, likely or not."""
    return {
        "tokens": [tokenizer.token_text(token.token_id) for token in tokens],
        "token_logprobs": [None if token.logprob is None else _finite(token.logprob.logprob) for token in tokens],
        "top_logprobs": [None if token.logprob is None else _by_text(token.logprob, tokenizer) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def chat_logprobs(tokens: Sequence[TokenText], tokenizer: Tokenizer) -> dict[str, Any]:
    content = []
    for token in tokens:
        assert token.logprob is not None, "only echoed prompts have tokens without one"
        top = [_entry(token_id, logprob, tokenizer) for token_id, logprob in token.logprob.top]
        content.append({**_entry(token.token_id, token.logprob.logprob, tokenizer), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _by_text(logprob: TokenLogprob, tokenizer: Tokenizer) -> dict[str, float]:
    entries: dict[str, float] = {}
    for token_id, value in [*logprob.top, (logprob.token_id, logprob.logprob)]:
        entries.setdefault(tokenizer.token_text(token_id), _finite(value))
    return entries


def _entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _finite(value: float) -> float:
    return max(value, LOWEST)
