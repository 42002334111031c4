"""Tests truncated texts and text pairs against transformers' tokenizers."""

import pytest
from transformers import PreTrainedTokenizerFast

from quire.engine.common.errors import InvalidRequest
from quire.engine.text.pooling_inputs import encode_pairs_with_second_start, encode_truncated
from tests.texts import Named, pair_tokenizer

TEXTS = ("", "a", "some words", "a much longer text, with a number: 12345", "x" * 70)


def transformers_tokenizer(named: Named, side: str = "right") -> PreTrainedTokenizerFast:
    backend = named.tokenizer.backend
    return PreTrainedTokenizerFast(tokenizer_object=backend.from_str(backend.to_str()), truncation_side=side)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("limit", [3, 4, 12, 42, 500])
def test_encode_truncated_keeps_special_tokens(limit: int, side: str) -> None:
    named = pair_tokenizer()
    expected = transformers_tokenizer(named, side)(list(TEXTS), truncation=True, max_length=limit)["input_ids"]
    assert encode_truncated(named.tokenizer, TEXTS, limit, side) == expected
    plain = transformers_tokenizer(named, side)(
        list(TEXTS), truncation=True, max_length=limit, add_special_tokens=False
    )["input_ids"]
    assert encode_truncated(named.tokenizer, TEXTS, limit, side, add_special_tokens=False) == plain


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("limit", [None, 5, 6, 20, 43, 44, 80, 500])
def test_pair_encoding_truncates_longer_text_first(limit: int | None, segments: bool) -> None:
    named = pair_tokenizer(segments=segments)
    pairs = [(first, second) for first in TEXTS for second in TEXTS]
    truncation = {} if limit is None else {"truncation": "longest_first", "max_length": limit}
    expected = transformers_tokenizer(named)(
        [first for first, _ in pairs], [second for _, second in pairs], return_token_type_ids=True, **truncation
    )
    encoded = encode_pairs_with_second_start(named.tokenizer, pairs, limit)
    for (ids, begin), expected_ids, type_ids in zip(
        encoded, expected["input_ids"], expected["token_type_ids"], strict=True
    ):
        assert ids == expected_ids
        assert begin == (type_ids.index(1) if 1 in type_ids else None)


def test_second_text_of_pair_has_own_limit() -> None:
    ((ids, begin),) = encode_pairs_with_second_start(pair_tokenizer().tokenizer, [("abc", "defgh")], None, 2)
    assert (ids, begin) == ([256, 97, 98, 99, 258, 100, 101, 258], 5)


def test_limit_below_number_of_special_tokens_is_rejected() -> None:
    for limit in (1, 2):
        with pytest.raises(InvalidRequest, match="2 special tokens"):
            encode_truncated(pair_tokenizer().tokenizer, ["a"], limit, "right")
    with pytest.raises(InvalidRequest, match="3 special tokens"):
        encode_pairs_with_second_start(pair_tokenizer().tokenizer, [("a", "b")], 3)
