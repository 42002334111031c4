"""The texts from which `quire quantize --smooth` learns which inputs of linears are large, as token ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from quire.engine.errors import ConfigError, InvalidRequest
from quire.engine.text.chat_template import ChatRenderer
from quire.engine.text.tokenizer import Tokenizer
from quire.server.protocol.chat import ChatRequest
from quire.server.resolve.parse import validated

PIECE = 512
"""Tokens of a piece of text, at most."""
TOKENS = 16_384
"""How many are read. More changes little: of each input the largest counts, and large ones are so everywhere."""
_CHARACTERS = 16 * TOKENS
"""Of a text, as many as are enough."""


class _Line(msgspec.Struct):
    """Of a JSONL file: one of these."""

    text: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


def read_samples(file: Path, tokenizer: Tokenizer, longest: int) -> list[list[int]]:
    """Pieces of at most `longest` tokens, and PIECE: of a file whose name ends with .jsonl each line's beginning, of
    any other one piece after another.

    Raises ConfigError for a file that cannot be read, and for one that gives no token.
    """
    longest = min(PIECE, longest)
    try:
        with file.open(encoding="utf-8") as opened:
            if file.suffix == ".jsonl":
                pieces = _of_lines(opened, tokenizer, longest)
            else:
                pieces = _cut(tokenizer.encode(opened.read(_CHARACTERS)), longest)
            found = _enough(pieces)
    except OSError as error:
        raise _wrong(f"{file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise _wrong(f"{file}: is not UTF-8") from error
    except InvalidRequest as error:
        raise _wrong(f"{file}: {error}") from error
    if not found:
        raise _wrong(f"{file}: has no text")
    return found


def _of_lines(lines: Iterator[str], tokenizer: Tokenizer, longest: int) -> Iterator[list[int]]:
    renderer = ChatRenderer(tokenizer.chat_templates, tokenizer.special_tokens)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            read = msgspec.json.decode(line, type=_Line)
        except msgspec.MsgspecError as error:
            raise _wrong(f"line {number}: {error}") from error
        text = read.prompt if read.text is None else read.text
        if read.messages is not None:
            yield tokenizer.encode(_rendered(read.messages, renderer, number), add_special_tokens=False)[:longest]
        elif text is not None:
            yield tokenizer.encode(text[:_CHARACTERS])[:longest]
        else:
            raise _wrong(f"line {number}: has neither text, prompt nor messages")


def _rendered(messages: list[dict[str, Any]], renderer: ChatRenderer, line: int) -> str:
    try:
        talk = validated({"messages": messages}, ChatRequest).messages
        return renderer.render([message.as_dict() for message in talk], add_generation_prompt=False)
    except InvalidRequest as error:
        raise _wrong(f"line {line}: {error}") from error


def _cut(ids: list[int], longest: int) -> Iterator[list[int]]:
    return (ids[first : first + longest] for first in range(0, len(ids), longest))


def _enough(pieces: Iterator[list[int]]) -> list[list[int]]:
    found, left = list[list[int]](), TOKENS
    for piece in pieces:
        if piece:
            found.append(piece[:left])
            left -= len(found[-1])
        if not left:
            break
    return found


def _wrong(message: str) -> ConfigError:
    return ConfigError(f"smooth: {message}", param="smooth")
