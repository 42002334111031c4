from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Literal

import tokenizers

from quire.engine.common.errors import InvalidRequest
from quire.engine.text.tokenizer import Tokenizer

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
RERANKER_PROMPT_START = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
RERANKER_PROMPT_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""End of the prompts in Qwen3-Reranker's training (Zhang et al., 2025, "Qwen3 Embedding")."""
TruncationSide = Literal["left", "right"]


def encode_truncated(
    tokenizer: Tokenizer, texts: Sequence[str], limit: int, side: TruncationSide, *, add_special_tokens: bool = True
) -> list[list[int]]:
    """`limit`: maximum number of tokens, with special tokens. Raises InvalidRequest."""
    num_special_tokens = tokenizer.backend.num_special_tokens_to_add(False) if add_special_tokens else 0
    max_text_tokens = _max_text_tokens(limit, num_special_tokens)
    truncated = []
    for encoding in tokenizer.encodings(texts, add_special_tokens=False):
        encoding.truncate(max_text_tokens, direction=side)
        if add_special_tokens:
            encoding = tokenizer.backend.post_process(encoding)
        truncated.append(tokenizer.require_model_token_ids(encoding.ids))
    return truncated


def encode_pairs_with_second_start(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], limit: int | None, max_second_tokens: int | None = None
) -> list[tuple[list[int], int | None]]:
    """The second text's start is None unless the tokenizer distinguishes segments. `limit`: maximum tokens of a pair;
    the longer text's end is cut first. `max_second_tokens`: maximum tokens of the second text, without special tokens.
    Raises InvalidRequest.
    """
    num_special_tokens = tokenizer.backend.num_special_tokens_to_add(True)
    max_text_tokens = None if limit is None else _max_text_tokens(limit, num_special_tokens)
    # Encode each text only once, because a query may be paired with thousands of documents.
    firsts = _encodings_by_text(tokenizer, [first for first, _ in pairs], max_text_tokens, None)
    seconds = _encodings_by_text(tokenizer, [second for _, second in pairs], max_text_tokens, max_second_tokens)
    encoded = []
    for a, b in pairs:
        (first, length), (second, second_length) = firsts[a], seconds[b]
        if max_text_tokens is not None and length + second_length > max_text_tokens:
            first, second = copy(first), copy(second)
            lengths = _truncated_lengths(length, second_length, max_text_tokens)
            first.truncate(lengths[0])
            second.truncate(lengths[1])
        pair_encoding = tokenizer.backend.post_process(first, second)
        second_start = pair_encoding.type_ids.index(1) if 1 in pair_encoding.type_ids else None
        encoded.append((tokenizer.require_model_token_ids(pair_encoding.ids), second_start))
    return encoded


def encode_reranker_prompts(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], instruction: str | None, limit: int | None
) -> list[list[int]]:
    """If a prompt exceeds `limit` tokens, the document's end is cut. Raises InvalidRequest."""
    start, end = (
        tokenizer.encode(text, add_special_tokens=False) for text in (RERANKER_PROMPT_START, RERANKER_PROMPT_END)
    )
    texts = [
        f"<Instruct>: {instruction or DEFAULT_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        for query, document in pairs
    ]
    max_text_tokens = None if limit is None else _max_text_tokens(limit, len(start) + len(end))
    return [[*start, *ids[:max_text_tokens], *end] for ids in tokenizer.encode_batch(texts, add_special_tokens=False)]


def _max_text_tokens(limit: int, num_special_tokens: int) -> int:
    if limit <= num_special_tokens:
        message = f"truncate_prompt_tokens must leave room for {num_special_tokens} special tokens, got {limit}"
        raise InvalidRequest(message, param="truncate_prompt_tokens")
    return limit - num_special_tokens


def _truncated_lengths(first: int, second: int, max_total_tokens: int) -> tuple[int, int]:
    if first + second <= max_total_tokens:
        return first, second
    shorter = min(first, second, max_total_tokens // 2)
    return (max_total_tokens - shorter, shorter) if first > second else (shorter, max_total_tokens - shorter)


def _encodings_by_text(
    tokenizer: Tokenizer, texts: Sequence[str], max_text_tokens: int | None, max_tokens: int | None
) -> dict[str, tuple[tokenizers.Encoding, int]]:
    """Returns for each text the encoding, truncated to `max_text_tokens` and `max_tokens`, and the number of tokens,
    limited only by `max_tokens`.
    """
    unique = list(dict.fromkeys(texts))
    encodings = {}
    for text, encoding in zip(unique, tokenizer.encodings(unique, add_special_tokens=False), strict=True):
        length = len(encoding) if max_tokens is None else min(len(encoding), max_tokens)
        encoding.truncate(length if max_text_tokens is None else min(length, max_text_tokens))
        encodings[text] = encoding, length
    return encodings
