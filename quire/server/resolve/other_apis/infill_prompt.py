"""Prompts of POST /infill, as llama.cpp builds them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from quire.engine.text.conversation.literal_encoding import encode_with_literal_texts
from quire.engine.text.tokenizer import Tokenizer
from quire.server.protocol.llama_cpp import InfillChunk, InfillRequest
from quire.server.resolve.checks import check_no_surrogates, check_prompt_length
from quire.server.resolve.prompts import build_infill_ids, check_and_encode_texts
from quire.server.served_model import ServedModel

REPOSITORY_TOKENS = ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")
FILE_SEPARATOR_TOKENS = ("<|file_sep|>",)
PAD_TOKENS = ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>")
REPOSITORY_NAME = "myproject\n"
"""Same text as in llama.cpp, like the next two constants."""
OPEN_FILE_NAME = "filename\n"
CHUNK_HEADING = "\n\n--- snippet ---\n\n"
"""Used for tokenizers without a file separator."""
WINDOW_TOKENS = 2048
"""Tokens around the cursor, as many as llama.cpp's batch: up to 3/4 before it, up to 1/4 after it."""
MAX_TOKEN_CHARACTERS = 32
"""A text is cut to this many characters per available token before tokenization, because more would not fit."""
_GUARD = "\u263a"
"""Put before a text, so that the tokenizer adds its first space to this character and not to the text."""


def build_infill_prompt(body: InfillRequest, model: ServedModel) -> list[int]:
    """Raises InvalidRequest if the tokenizer has no infill tokens, and ContextLengthExceeded for a long `prompt`."""
    tokenizer = model.tokenizer
    for name in ("input_prefix", "input_suffix"):
        check_no_surrogates(getattr(body, name), name)
    window = min(WINDOW_TOKENS, model.context_length // 2)
    line = _guard(tokenizer) + body.prompt
    line_ids = _remove_guard(tokenizer, check_and_encode_texts(model, [line], False, "prompt")[0])
    num_prefix, num_suffix = 3 * (window // 4), max(0, window // 4 - 2 - len(line_ids))
    prefix = body.input_prefix[-MAX_TOKEN_CHARACTERS * num_prefix :]
    prefix_ids = encode_with_literal_texts(tokenizer, prefix, [prefix], add_special_tokens=False)
    suffix_ids = _encode_source(tokenizer, body.input_suffix[: MAX_TOKEN_CHARACTERS * num_suffix])
    num_extra = model.context_length - window - window // 8
    ids = build_infill_ids(
        tokenizer,
        [*prefix_ids[-num_prefix:], *line_ids],
        suffix_ids[:num_suffix],
        add_special_tokens=True,
        extra_ids=_build_extra_ids(tokenizer, body.input_extra, num_extra),
        param="input_suffix",
    )
    check_prompt_length(ids, model.context_length, "prompt")
    return ids


def infill_end_token_ids(model: ServedModel) -> list[int]:
    names = (*PAD_TOKENS, *REPOSITORY_TOKENS, *FILE_SEPARATOR_TOKENS)
    ids = [model.tokenizer.backend.token_to_id(name) for name in names]
    return [token_id for token_id in ids if token_id is not None and token_id < model.vocab_size]


def _build_extra_ids(tokenizer: Tokenizer, chunks: Sequence[InfillChunk], limit: int) -> list[int]:
    """Returns at most the last `limit` tokens. The limit does not depend on the open file, so edits of that file leave
    this prefix cached.
    """
    repository = _find_token(tokenizer, REPOSITORY_TOKENS)
    separator = _find_token(tokenizer, FILE_SEPARATOR_TOKENS)
    pieces = [] if separator is None else [[separator, *_encode_source(tokenizer, OPEN_FILE_NAME)]]
    num_ids = sum(map(len, pieces))
    for index in range(len(chunks) - 1, -1, -1):
        chunk, field = chunks[index], f"input_extra[{index}]"
        check_no_surrogates(chunk.text + chunk.filename, field)
        if num_ids >= limit:
            continue
        heading = (
            _encode_source(tokenizer, CHUNK_HEADING)
            if separator is None
            else [separator, *_encode_source(tokenizer, chunk.filename + "\n")]
        )
        text_ids = _encode_source(tokenizer, chunk.text[-MAX_TOKEN_CHARACTERS * limit :])
        pieces.append(heading + text_ids)
        num_ids += len(heading) + len(text_ids)
    if repository is not None:
        pieces.append([repository, *_encode_source(tokenizer, REPOSITORY_NAME)])
    return list(chain.from_iterable(reversed(pieces)))[-limit:]


def _find_token(tokenizer: Tokenizer, names: Sequence[str]) -> int | None:
    return next((found for name in names if (found := tokenizer.backend.token_to_id(name)) is not None), None)


def _encode_source(tokenizer: Tokenizer, text: str) -> list[int]:
    """Special tokens in source code are plain text. No space is added at the start."""
    return _remove_guard(
        tokenizer, encode_with_literal_texts(tokenizer, _guard(tokenizer) + text, [text], add_special_tokens=False)
    )


def _guard(tokenizer: Tokenizer) -> str:
    return _GUARD if tokenizer.strips_first_space else ""


def _remove_guard(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return ids[len(tokenizer.encode(_guard(tokenizer), add_special_tokens=False)) :]
