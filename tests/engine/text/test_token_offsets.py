"""Tests the offsets of a prompt's tokens against the tokenizers library's decoding of the tokens before each."""

from __future__ import annotations

import unicodedata

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from quire.engine.text.detokenizer import REPLACEMENT_CHARACTER
from quire.engine.text.token_offsets import decode_with_offsets, find_token_offsets
from quire.engine.text.tokenizer import Tokenizer
from tests.texts import BYTES, byte_level_tokenizer, real_tokenizers, sentence_piece_tokenizer


def normalizing_tokenizer() -> Tokenizer:
    """A byte tokenizer with two words that begin with a space; it normalizes to NFC, and spans omit that space, as
    GPT-2's do.
    """
    vocabulary = {character: i for i, character in enumerate([*BYTES, "\u0120a", "\u0120ab"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("\u0120", "a"), ("\u0120a", "b")]))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend, special_tokens={}, chat_templates={})


OURS = [byte_level_tokenizer(), sentence_piece_tokenizer(), *real_tokenizers()]
NAMES = [each.name for each in OURS]
each_tokenizer = pytest.mark.parametrize("tokenizer", [each.tokenizer for each in OURS], ids=NAMES)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|endoftext|>", " ", "\n", "ab", " ab"]
texts = st.lists(st.sampled_from(SPECIAL) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=6)
ACCENTS = ["a", "b", " ", "  ", "e\u0301", "\u00e9", "\n", "<|end|>", "日", "한"]
accents = st.lists(st.sampled_from(ACCENTS), max_size=12)


@each_tokenizer
@given(pieces=texts, special=st.booleans())
@example(pieces=["<|im_start|>", "user\nhi", "<|im_end|>", "\n"], special=True)
def test_token_offsets_equal_length_of_decoded_prefix(tokenizer: Tokenizer, pieces: list[str], special: bool) -> None:
    text = "".join(pieces)
    ids = tokenizer.encode(text, add_special_tokens=special)
    starts = find_token_offsets(tokenizer, text, add_special_tokens=special)
    assert len(starts) == len(ids)
    assert starts == sorted(starts)
    assert all(0 <= start <= len(text) for start in starts)
    inner = tokenizer.encode(text, add_special_tokens=False)
    before = len(ids) - len(inner)  # BOS
    assert ids[before:] == inner
    if tokenizer.decode(inner, skip_special_tokens=False) != text:
        return
    assert starts[:before] == [0] * before
    for count, start in enumerate(starts[before:]):
        decoded = tokenizer.decode(inner[:count], skip_special_tokens=False)
        if not decoded.endswith(REPLACEMENT_CHARACTER):
            assert start == len(decoded), (count, inner)


@given(accents)
def test_token_offsets_refer_to_text_before_normalization(pieces: list[str]) -> None:
    tokenizer, text = normalizing_tokenizer(), "".join(pieces)
    ids = tokenizer.encode(text)
    starts = find_token_offsets(tokenizer, text, add_special_tokens=True)
    assert len(starts) == len(ids)
    for count, start in enumerate(starts):
        decoded = tokenizer.decode(ids[:count], skip_special_tokens=False)
        if not decoded.endswith(REPLACEMENT_CHARACTER):
            assert unicodedata.normalize("NFC", text[:start]) == decoded


@each_tokenizer
@given(data=st.data())
def test_decode_with_offsets_of_any_ids_refers_to_returned_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1) | st.integers(0, 4), max_size=20))
    text, starts = decode_with_offsets(tokenizer, ids)
    assert (len(starts), starts) == (len(ids), sorted(starts))
    for count, start in enumerate(starts):
        before, _ = decode_with_offsets(tokenizer, ids[:count])
        if not before.endswith(REPLACEMENT_CHARACTER):
            assert text[:start] == before


def test_token_offsets_count_special_tokens() -> None:
    tokenizer = byte_level_tokenizer().tokenizer
    assert decode_with_offsets(tokenizer, [256, 65, 257, 66]) == ("<|bos|>A<|im_start|>B", [0, 7, 8, 20])
    assert find_token_offsets(tokenizer, "<|bos|>A<|im_start|>B", add_special_tokens=True) == [0, 7, 8, 20]
    llama = sentence_piece_tokenizer().tokenizer
    assert find_token_offsets(llama, "ab ab", add_special_tokens=True) == [0, 0, 2], "BOS is not in the text"
    assert find_token_offsets(llama, "<s>ab", add_special_tokens=False)[:2] == [0, 3], (
        "its decoding has a space that is not"
    )
