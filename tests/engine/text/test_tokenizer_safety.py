"""Tests that usual regular expressions of tokenizers pass, and that those that take exponential time are rejected."""

from __future__ import annotations

import pytest
import tokenizers

from quire.engine.common.errors import ModelError
from quire.engine.text.tokenizer_safety import check_regexes, is_suspicious_regex

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
UPPER_LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+"
THREES = r"\d{1,3}(?=(?:\d{3})*\b)"


def tokenizer_with_split_pattern(pattern: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return backend


@pytest.mark.parametrize("pattern", [GPT2, LLAMA3, UPPER_LOWER])
def test_common_tokenizer_patterns_are_not_suspicious(pattern: str) -> None:
    assert not is_suspicious_regex(pattern)


@pytest.mark.parametrize("pattern", [THREES, r"(?:ab)+c", r"\((a|b)\)"])
def test_harmless_repeated_group_passes_check(pattern: str) -> None:
    check_regexes(tokenizer_with_split_pattern(pattern))


@pytest.mark.few(2)
@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(\w+\s?)*$", r"([a-z]+)*1", r"(é|éé)+!$", r"a*a*a*a*a*b"])
def test_exponential_time_pattern_is_rejected(pattern: str) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: the pattern .* takes too long") as caught:
        check_regexes(tokenizer_with_split_pattern(f"x|{pattern}"))
    assert "\n" not in str(caught.value)


def test_check_covers_normalizer_and_decoder_patterns() -> None:
    harmless, bad = tokenizers.Regex(THREES), tokenizers.Regex("(a+)+$")
    backend = tokenizer_with_split_pattern(GPT2)
    backend.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Replace(harmless, "")])
    check_regexes(backend)
    backend.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.Replace(bad, " ")])
    with pytest.raises(ModelError, match=r"\(a\+\)\+\$"):
        check_regexes(backend)
