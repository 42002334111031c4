from __future__ import annotations

import pytest

from quire.engine.common.errors import InvalidRequest
from quire.engine.text.token_sequences.sequence_breakers import sequence_breaker_ids
from tests.texts import Named, byte_level_tokenizer, real_tokenizers, sentence_piece_tokenizer

TOKENIZERS = [byte_level_tokenizer(), sentence_piece_tokenizer(), *real_tokenizers()]


@pytest.mark.parametrize("named", TOKENIZERS, ids=lambda named: named.name)
def test_default_breakers_are_all_tokens_that_contain_one(named: Named) -> None:
    tokenizer = named.tokenizer
    single = {ids[0] for ids in sequence_breaker_ids(None, tokenizer) if len(ids) == 1}
    containing = range(tokenizer.max_token_id + 1)
    assert single == {
        token for token in containing if any(text in tokenizer.token_bytes(token) for text in (b"\n", b":", b'"', b"*"))
    }


@pytest.mark.parametrize("named", TOKENIZERS, ids=lambda named: named.name)
@pytest.mark.parametrize("breaker", ["ab", "\n\n", "é:"])
def test_breaker_of_several_tokens_is_found_in_text(named: Named, breaker: str) -> None:
    tokenizer = named.tokenizer
    sequences = set(sequence_breaker_ids([breaker], tokenizer))
    for text in (breaker, f"a{breaker}", f"c c{breaker}"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        ends = {tuple(ids[begin:]) for begin in range(len(ids))}
        assert ends & sequences, (text, ids)
    for sequence in sequences:
        assert breaker.encode() in b"".join(map(tokenizer.token_bytes, sequence))


def test_number_of_breakers_is_limited_and_may_be_none() -> None:
    with pytest.raises(InvalidRequest, match="dry_sequence_breakers takes at most 64 strings"):
        sequence_breaker_ids([str(number) for number in range(65)], byte_level_tokenizer().tokenizer)
    assert sequence_breaker_ids([], byte_level_tokenizer().tokenizer) == ()


@pytest.mark.parametrize("named", TOKENIZERS, ids=lambda named: named.name)
def test_listed_bytes_are_each_tokens_bytes(named: Named) -> None:
    tokenizer = named.tokenizer
    listed = tokenizer.list_token_bytes()
    assert listed == [tokenizer.token_bytes(token) for token in range(tokenizer.max_token_id + 1)]
