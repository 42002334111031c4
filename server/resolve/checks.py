"""Checks of single values of a request. All raise InvalidRequest that names the parameter."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.errors import ContextLengthExceeded, InvalidRequest


def check_logprobs(name: str, value: int | None, max_logprobs: int) -> None:
    if value is not None and value > max_logprobs:
        raise InvalidRequest(f"{name} must be at most {max_logprobs}, got {value}", param=name)


def check_token_id(token_id: int, vocab_size: int, param: str) -> None:
    if not 0 <= token_id < vocab_size:
        raise InvalidRequest(
            f"{param} contains token id {token_id}, which is outside the vocabulary (0 to {vocab_size - 1})",
            param=param,
        )


def check_text(text: str, param: str) -> None:
    """Refuse half of a surrogate pair: JSON can spell it, but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"{param} contains half of a surrogate pair, which is not a character", param=param
        ) from None


def check_length(ids: Sequence[int], max_model_len: int, param: str) -> None:
    """A prompt must have a token to continue, and leave room for one more."""
    if not ids:
        raise InvalidRequest(f"{param} must not be empty", param=param)
    if len(ids) >= max_model_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens, but {param} came to {len(ids)} tokens, "
            "which leaves no room for an answer. Please shorten it",
            param=param,
        )
