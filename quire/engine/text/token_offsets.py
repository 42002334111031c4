from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import tokenizers

from quire.engine.text.detokenizer import IncrementalDetokenizer
from quire.engine.text.tokenizer import Tokenizer


def decode_with_offsets(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, list[int]]:
    delta = IncrementalDetokenizer(tokenizer, skip_special_tokens=False).push_tokens(ids, final=True)
    return delta.text, list(delta.offsets)


def find_token_offsets(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Returns each token's offset in characters. Offsets never decrease. Added tokens such as BOS begin where the next
    token does.
    """
    encoding = tokenizer.backend.encode(text, add_special_tokens=add_special_tokens)
    added = [bool(flag) for flag in encoding.special_tokens_mask]
    written = [token_id for token_id, flag in zip(encoding.ids, added, strict=True) if not flag]
    decoded, starts = decode_with_offsets(tokenizer, written)
    if decoded != text:  # the tokenizer normalizes texts, e.g. to NFC
        starts = _token_starts_from_library(tokenizer.backend, text)
        if len(starts) != len(written):  # the library's spans may lack a word's space
            spans = zip(encoding.offsets, added, strict=True)
            starts = list(accumulate((start for (start, _), flag in spans if not flag), max))
    rest = iter(reversed(starts))
    offsets, next_one = [], len(text)
    for flag in reversed(added):
        next_one = next_one if flag else next(rest)
        offsets.append(next_one)
    return offsets[::-1]


def _token_starts_from_library(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """Positions are in the original text. The post-processor is not used, because it may exclude a word's space."""
    bare = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        bare.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        bare.pre_tokenizer = backend.pre_tokenizer
    bare.add_tokens([token for _, token in sorted(backend.get_added_tokens_decoder().items())])
    return list(accumulate((start for start, _ in bare.encode(text, add_special_tokens=False).offsets), max))
