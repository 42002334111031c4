"""Converts DRY's sequence breakers to token ids. As in llama.cpp, they match however a text is split into tokens."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import MAX_SEQUENCE_BREAKER_LENGTH, MAX_SEQUENCE_BREAKERS
from quire.engine.text.null_tokenizer import NullTokenizer
from quire.engine.text.tokenizer import Tokenizer

DEFAULT_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")
"""llama.cpp's defaults."""
_MAX_TOKEN_SEQUENCES = 2**15
_SEPARATOR = b"\xff"
"""Separates tokens. UTF-8 never uses this byte, so no match spans two tokens."""


def sequence_breaker_ids(breakers: Sequence[str] | None, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """`breakers`: None means the default. Unless it is empty, a first call searches the vocabulary, which takes half a
    second for 150,000 tokens. Raises InvalidRequest.
    """
    texts = DEFAULT_SEQUENCE_BREAKERS if breakers is None else tuple(dict.fromkeys(breakers))
    param = "dry_sequence_breakers"
    if len(texts) > MAX_SEQUENCE_BREAKERS:
        message = f"{param} takes at most {MAX_SEQUENCE_BREAKERS} strings, got {len(texts)}"
        raise InvalidRequest(message, param=param)
    if not all(texts):
        raise InvalidRequest(f"{param} must not contain an empty string", param=param)
    if any(len(text) > MAX_SEQUENCE_BREAKER_LENGTH for text in texts):
        message = f"{param} must not contain strings of more than {MAX_SEQUENCE_BREAKER_LENGTH} characters"
        raise InvalidRequest(message, param=param)
    if texts and isinstance(tokenizer, NullTokenizer):
        message = f"the model is served without a tokenizer, which {param} needs: pass an empty list"
        raise InvalidRequest(message, param=param)
    return _find_breaker_ids(texts, tokenizer)


@lru_cache(maxsize=32)
def _find_breaker_ids(texts: tuple[str, ...], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    sequences: dict[tuple[int, ...], None] = {}
    for text in texts:
        for sequence in _find_token_sequences(text, tokenizer):
            sequences[sequence] = None
            if len(sequences) > _MAX_TOKEN_SEQUENCES:
                message = f"dry_sequence_breakers: more than {_MAX_TOKEN_SEQUENCES} token sequences contain them"
                raise InvalidRequest(message, param="dry_sequence_breakers")
    return tuple(sequences)


def _find_token_sequences(text: str, tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    """Yields each token that contains the text, and each token that ends with a beginning of the text, followed by the
    tokens of the rest of the text.
    """
    vocabulary, encoded = _vocabulary_bytes(tokenizer), text.encode()
    yield from ((token,) for token in _find_tokens(encoded, vocabulary))
    rests = {len(text[:index].encode()): _encode_within_text(text[index:], tokenizer) for index in range(1, len(text))}
    if whole := _encode_within_text(text, tokenizer):
        rests.setdefault(len(tokenizer.token_bytes(whole[0])), whole[1:])
    for length, rest in rests.items():
        if rest:
            for token in _find_tokens(encoded[:length] + _SEPARATOR, vocabulary):
                yield (token, *rest)


def _encode_within_text(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the tokens of `text` where it follows other text, because many tokenizers put a space before a first
    token. Returns () if the text always shares a token with other text.
    """
    for context in ("", "\n", "a", "0"):
        ids = tokenizer.encode(context + text, add_special_tokens=False)
        for begin in range(len(ids)):
            if b"".join(map(tokenizer.token_bytes, ids[begin:])) == text.encode():
                return tuple(ids[begin:])
    return ()


@lru_cache(maxsize=2)
def _vocabulary_bytes(tokenizer: Tokenizer) -> tuple[bytes, array[int]]:
    """Returns the bytes of all tokens, each followed by _SEPARATOR, and each token's position in them."""
    tokens = tokenizer.list_token_bytes()
    starts = array("q", accumulate((len(token) + len(_SEPARATOR) for token in tokens), initial=0))[:-1]
    return _SEPARATOR.join([*tokens, b""]), starts


def _find_tokens(part: bytes, vocabulary: tuple[bytes, array[int]]) -> Iterator[int]:
    joined, starts = vocabulary
    position = joined.find(part)
    while position >= 0:
        token = bisect_right(starts, position) - 1
        yield token
        position = joined.find(part, starts[token + 1]) if token + 1 < len(starts) else -1
