r"""How byte-level tokenizers cut a text before they merge, by llama.cpp's names (tokenizer.ggml.pre).

Each is what the models' own tokenizer.json says, or an equal of it: expressions that cut one after another, what one
matches and what is between.
"""

from __future__ import annotations

from typing import NamedTuple


class Split(NamedTuple):
    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A piece that is a token as a whole is taken as that."""
    adds_bos: bool = False
    """Unless the file says otherwise."""
    nfc: bool = False
    """The text is brought to Unicode's composed form first."""


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = Split((rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}",))
_QWEN2 = (rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}",)
_MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Qwen3.5's, in which marks belong to words."""
_DIGITS = Split((r"\p{N}", _GPT2))
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_O200K = "|".join(rf"{word}{_CONTRACTIONS}?" for word in _CASED.split("|"))
_REST_WITH_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATED = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    rf"{_PUNCTUATED}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_LLAMA3_WITH_BOS = _LLAMA3._replace(ignore_merges=True, adds_bos=True)

SPLITS = {
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"), Split((_GPT2,))),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "pixtral"), _LLAMA3_WITH_BOS),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), Split(_QWEN2, nfc=True)),
    "qwen35": Split((rf"{_CONTRACTIONS}|{_MARKED}",), nfc=True),
    "stablelm2": Split(_QWEN2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("gpt-4o", "llama4"), Split((rf"{_O200K}|\p{{N}}{{1,3}}|{_REST_WITH_SLASHES}",))),
    "tekken": Split((rf"{_CASED}|\p{{N}}|{_REST_WITH_SLASHES}",), True, True),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-v3": Split(_DEEPSEEK3),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
}
