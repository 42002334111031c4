"""The token sequences of words that an answer must not contain."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.errors import InvalidRequest
from quire.engine.text.tokenizer import Tokenizer


def bad_words_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of each word at the beginning of a text, and behind a space. Raises InvalidRequest.

    This is vLLM's rule with one exception: vLLM leaves out the second form when it has another number of tokens than
    the first, and lets the word through.
    """
    if not all(word.strip() for word in words):
        raise InvalidRequest("bad_words must not contain an empty word", param="bad_words")
    forms = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
    return tuple(dict.fromkeys(map(tuple, tokenizer.encode_batch(forms, add_special_tokens=False))))
