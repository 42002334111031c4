"""Patterns of byte-level pre-tokenizers by llama.cpp's names (tokenizer.ggml.pre), equivalent to those of
tokenizer.json. Each pattern in turn splits texts into its matches and the text between them.
"""

from __future__ import annotations

from typing import NamedTuple


class PreTokenizerSpec(NamedTuple):
    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """If True, text that equals a token becomes this token without merges."""
    adds_bos: bool = False
    """Default for a missing add_bos_token."""
    normalizes_nfc: bool = False


_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST_PATTERN = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3_SPEC = PreTokenizerSpec((rf"{_CONTRACTIONS_PATTERN}|{_WORD_PATTERN}|\p{{N}}{{1,3}}|{_REST_PATTERN}",))
_QWEN2_PATTERNS = (rf"{_CONTRACTIONS_PATTERN}|{_WORD_PATTERN}|\p{{N}}|{_REST_PATTERN}",)
_QWEN35_PATTERN = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGITS_SPEC = PreTokenizerSpec((r"\p{N}", _GPT2_PATTERN))
_UPPER_CLASS, _LOWER_CLASS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORD_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER_CLASS}*{_LOWER_CLASS}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_CLASS}+{_LOWER_CLASS}*"
)
_O200K_PATTERN = "|".join(rf"{word}{_CONTRACTIONS_PATTERN}?" for word in _CASED_WORD_PATTERN.split("|"))
_REST_WITH_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATED_WORD_PATTERN = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_DEEPSEEK3_PATTERNS = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    rf"{_PUNCTUATED_WORD_PATTERN}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_LLAMA3_WITH_BOS_SPEC = _LLAMA3_SPEC._replace(ignore_merges=True, adds_bos=True)

PRE_TOKENIZERS = {
    "default": PreTokenizerSpec((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_PATTERN, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"), PreTokenizerSpec((_GPT2_PATTERN,))
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "pixtral"), _LLAMA3_WITH_BOS_SPEC),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe"), _LLAMA3_SPEC),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), PreTokenizerSpec(_QWEN2_PATTERNS, normalizes_nfc=True)),
    "qwen35": PreTokenizerSpec((rf"{_CONTRACTIONS_PATTERN}|{_QWEN35_PATTERN}",), normalizes_nfc=True),
    "stablelm2": PreTokenizerSpec(_QWEN2_PATTERNS),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_SPEC),
    **dict.fromkeys(
        ("gpt-4o", "llama4"), PreTokenizerSpec((rf"{_O200K_PATTERN}|\p{{N}}{{1,3}}|{_REST_WITH_SLASHES}",))
    ),
    "tekken": PreTokenizerSpec((rf"{_CASED_WORD_PATTERN}|\p{{N}}|{_REST_WITH_SLASHES}",), True, True),
    "deepseek-coder": PreTokenizerSpec((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-v3": PreTokenizerSpec(_DEEPSEEK3_PATTERNS),
    "falcon": PreTokenizerSpec((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_PATTERN, r"[0-9][0-9][0-9]")),
}
