"""Serves token ids without text, for skip_tokenizer_init."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import tokenizers

from quire.engine.common.errors import InvalidRequest
from quire.engine.text.tokenizer import Tokenizer

_NO_TOKENIZER_MESSAGE = "the model is served without a tokenizer (--skip-tokenizer-init)"


class NullTokenizer(Tokenizer):
    def __init__(self, eos_token_ids: Sequence[int] = ()) -> None:
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({}, unk_token=""))
        super().__init__(backend, special_tokens={}, chat_templates={}, eos_token_ids=eos_token_ids)

    def encodings(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[tokenizers.Encoding]:
        """Raises InvalidRequest for all texts."""
        if texts:
            raise InvalidRequest(f"{_NO_TOKENIZER_MESSAGE}: give token ids instead of text", param="prompt")
        return []

    def to_transformers(self) -> NoReturn:
        """Raises InvalidRequest."""
        raise InvalidRequest(_NO_TOKENIZER_MESSAGE, param="tokenizer")

    def token_display_text(self, token_id: int) -> str:
        """vLLM does the same with return_tokens_as_token_ids."""
        return f"token_id:{token_id}"


def load_tokenizer(
    folder: Path, chat_template: str | None, vocab_size: int, eos_token_ids: Sequence[int], *, skip: bool
) -> Tokenizer:
    """Raises the errors of Tokenizer.from_pretrained."""
    return (
        NullTokenizer(eos_token_ids)
        if skip
        else Tokenizer.from_pretrained(folder, chat_template, vocab_size, eos_token_ids)
    )


def check_text_params(tokenizer: Tokenizer, *, stop: Sequence[str], structured_outputs: object) -> None:
    """Raises InvalidRequest for parameters that need tokens' text."""
    if not isinstance(tokenizer, NullTokenizer):
        return
    for name, value in (("stop", stop), ("structured_outputs", structured_outputs)):
        if value:
            raise InvalidRequest(f"{_NO_TOKENIZER_MESSAGE}, and {name} needs one", param=name)
