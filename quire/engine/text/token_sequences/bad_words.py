from __future__ import annotations

from collections.abc import Collection, Sequence

from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import SamplingParams
from quire.engine.text.tokenizer import Tokenizer


def bad_words_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Returns each word's tokens with and without a space before. vLLM drops the form with a space if its length
    differs from the other form's, and so misses the word. Raises InvalidRequest for an empty word.
    """
    if not all(word.strip() for word in words):
        raise InvalidRequest("bad_words must not contain an empty word", param="bad_words")
    forms = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
    return tuple(dict.fromkeys(map(tuple, tokenizer.encode_batch(forms, add_special_tokens=False))))


def check_allowed_tokens_remain(params: SamplingParams, eos_token_ids: Collection[int]) -> None:
    """Raises InvalidRequest if `allowed_token_ids` is set and none of its tokens may be first."""
    if params.allowed_token_ids is None:
        return
    left = set(params.allowed_token_ids) - {word[0] for word in params.bad_words_ids if len(word) == 1}
    if params.min_tokens > 0:
        left -= {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    if not left:
        message = (
            "allowed_token_ids: bad_words forbids all of them, or min_tokens does because all of them end an answer"
        )
        raise InvalidRequest(message, param="allowed_token_ids")
