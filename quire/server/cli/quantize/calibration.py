"""Texts that show `quire quantize --smooth` which inputs of linears are large."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from quire.engine.common.errors import ConfigError, InvalidRequest
from quire.engine.text.conversation.chat_template import ChatRenderer
from quire.engine.text.tokenizer import Tokenizer
from quire.server.protocol.chat import ChatRequest
from quire.server.resolve.parse import validate_body

MAX_SAMPLE_TOKENS = 512
MAX_TOTAL_TOKENS = 16_384
"""More tokens would change little, because only the maximum of each input counts, and inputs that are large are large
everywhere.
"""
_MAX_CHARACTERS = 16 * MAX_TOTAL_TOKENS


class _SampleLine(msgspec.Struct):
    text: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


def read_tokenized_samples(file: Path, tokenizer: Tokenizer, max_tokens: int) -> list[list[int]]:
    """Returns samples of at most `max_tokens` and MAX_SAMPLE_TOKENS token ids. Each line of a .jsonl file is a sample,
    whose beginning is used. Any other text is split into samples. Raises ConfigError.
    """
    max_tokens = min(MAX_SAMPLE_TOKENS, max_tokens)
    try:
        with file.open(encoding="utf-8") as opened:
            if file.suffix == ".jsonl":
                pieces = _tokenize_jsonl_lines(opened, tokenizer, max_tokens)
            else:
                pieces = _split_token_chunks(tokenizer.encode(opened.read(_MAX_CHARACTERS)), max_tokens)
            samples = _limit_total_tokens(pieces)
    except OSError as error:
        raise _make_smooth_config_error(f"{file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise _make_smooth_config_error(f"{file}: is not UTF-8") from error
    except InvalidRequest as error:
        raise _make_smooth_config_error(f"{file}: {error}") from error
    if not samples:
        raise _make_smooth_config_error(f"{file}: has no text")
    return samples


def _tokenize_jsonl_lines(lines: Iterator[str], tokenizer: Tokenizer, max_tokens: int) -> Iterator[list[int]]:
    renderer = ChatRenderer(tokenizer.chat_templates, tokenizer.special_tokens)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            read = msgspec.json.decode(line, type=_SampleLine)
        except msgspec.MsgspecError as error:
            raise _make_smooth_config_error(f"line {number}: {error}") from error
        text = read.prompt if read.text is None else read.text
        if read.messages is not None:
            yield tokenizer.encode(_render_messages(read.messages, renderer, number), add_special_tokens=False)[
                :max_tokens
            ]
        elif text is not None:
            yield tokenizer.encode(text[:_MAX_CHARACTERS])[:max_tokens]
        else:
            raise _make_smooth_config_error(f"line {number}: has neither text, prompt nor messages")


def _render_messages(messages: list[dict[str, Any]], renderer: ChatRenderer, line: int) -> str:
    try:
        talk = validate_body({"messages": messages}, ChatRequest).messages
        return renderer.render([message.to_template_message() for message in talk], add_generation_prompt=False)
    except InvalidRequest as error:
        raise _make_smooth_config_error(f"line {line}: {error}") from error


def _split_token_chunks(ids: list[int], max_tokens: int) -> Iterator[list[int]]:
    return (ids[first : first + max_tokens] for first in range(0, len(ids), max_tokens))


def _limit_total_tokens(samples: Iterator[list[int]]) -> list[list[int]]:
    taken, left = list[list[int]](), MAX_TOTAL_TOKENS
    for piece in samples:
        if piece:
            taken.append(piece[:left])
            left -= len(taken[-1])
        if not left:
            break
    return taken


def _make_smooth_config_error(message: str) -> ConfigError:
    return ConfigError(f"smooth: {message}", param="smooth")
