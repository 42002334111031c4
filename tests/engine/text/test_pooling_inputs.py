"""Tests truncated texts and text pairs against transformers' tokenizers."""

import pytest
from transformers import PreTrainedTokenizerFast

from quire.engine.common.errors import InvalidRequest
from quire.engine.text.pooling_inputs import encode_pairs_with_second_start, encode_truncated
from tests.texts import Named, pair_tokenizer

TEXTS = ("", "a", "some words", "a much longer text, with a number: 12345", "x" * 70)


def judge(named: Named, side: str = "right") -> PreTrainedTokenizerFast:
    backend = named.tokenizer.backend
    return PreTrainedTokenizerFast(tokenizer_object=backend.from_str(backend.to_str()), truncation_side=side)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("limit", [3, 4, 12, 42, 500])
def test_a_text_is_cut_inside_of_its_marks(limit: int, side: str) -> None:
    named = pair_tokenizer()
    wanted = judge(named, side)(list(TEXTS), truncation=True, max_length=limit)["input_ids"]
    assert encode_truncated(named.tokenizer, TEXTS, limit, side) == wanted
    plain = judge(named, side)(list(TEXTS), truncation=True, max_length=limit, add_special_tokens=False)["input_ids"]
    assert encode_truncated(named.tokenizer, TEXTS, limit, side, add_special_tokens=False) == plain


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("limit", [None, 5, 6, 20, 43, 44, 80, 500])
def test_of_two_texts_the_longer_is_cut_first(limit: int | None, segments: bool) -> None:
    named = pair_tokenizer(segments=segments)
    pairs = [(first, second) for first in TEXTS for second in TEXTS]
    cut = {} if limit is None else {"truncation": "longest_first", "max_length": limit}
    wanted = judge(named)(
        [first for first, _ in pairs], [second for _, second in pairs], return_token_type_ids=True, **cut
    )
    found = encode_pairs_with_second_start(named.tokenizer, pairs, limit)
    for (ids, begin), judged, kinds in zip(found, wanted["input_ids"], wanted["token_type_ids"], strict=True):
        assert ids == judged
        assert begin == (kinds.index(1) if 1 in kinds else None)


def test_a_second_text_may_have_a_limit_of_its_own() -> None:
    ((ids, begin),) = encode_pairs_with_second_start(pair_tokenizer().tokenizer, [("abc", "defgh")], None, 2)
    assert (ids, begin) == ([256, 97, 98, 99, 258, 100, 101, 258], 5)


def test_marks_need_room() -> None:
    for limit in (1, 2):
        with pytest.raises(InvalidRequest, match="2 special tokens"):
            encode_truncated(pair_tokenizer().tokenizer, ["a"], limit, "right")
    with pytest.raises(InvalidRequest, match="3 special tokens"):
        encode_pairs_with_second_start(pair_tokenizer().tokenizer, [("a", "b")], 3)
