"""Fill in the middle (Bavarian et al., 2022): a prompt and a suffix as models trained for it read them."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import InvalidRequest
from engine.tokenizer import Tokenizer

MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek-Coder
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
)
"""What stands before the prompt, before the suffix, and before what is to be filled in."""
CODESTRAL = ("[SUFFIX]", "[PREFIX]")
"""What stands before the suffix, and before the prompt, which comes last and is continued."""


def infill(
    tokenizer: Tokenizer, prompt: Sequence[int], suffix: Sequence[int], *, add_special_tokens: bool
) -> list[int]:
    """Token ids of the whole: prompt and suffix come without special tokens. Raises InvalidRequest."""
    begin = tokenizer.encode("", add_special_tokens=add_special_tokens)
    for marks in (*MARKS, CODESTRAL):
        match [token_id for mark in marks if (token_id := tokenizer.backend.token_to_id(mark)) is not None]:
            case [before, between, middle]:
                return [*begin, before, *prompt, between, *suffix, middle]
            case [before, between] if marks is CODESTRAL:
                return [*begin, before, *suffix, between, *prompt]
    raise InvalidRequest(
        "suffix is not supported: this model's tokenizer has no fill-in-the-middle tokens", param="suffix"
    )
