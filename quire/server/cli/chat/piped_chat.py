from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import TextIO

from quire.engine.common.errors import QuireError
from quire.server.cli.chat.chat_session import ChatSession
from quire.server.cli.chat.commands import handle_line


def chat_over_pipes(chat: ChatSession, stdin: TextIO, out: TextIO) -> int:
    status = 0
    for line in _read_messages(stdin):
        outcome = handle_line(chat, line, partial(print, file=out), _print_error)
        if outcome.should_exit:
            break
        if outcome.draft is not None:
            print("/edit needs the new text here", file=out)
        if outcome.prompt is not None:
            status = send_and_print_answer(chat, outcome.prompt, out)
    return status


def _read_messages(stdin: TextIO) -> Iterator[str]:
    """A trailing backslash continues a line."""
    parts: list[str] = []
    for line in stdin:
        text = line.rstrip("\n")
        if text.endswith("\\"):
            parts.append(text[:-1])
            continue
        whole = "\n".join([*parts, text]).strip()
        parts = []
        if whole:
            yield whole
    if rest := "\n".join(parts).strip():
        yield rest


def _print_error(why: str) -> None:
    print(f"quire chat: {why}", file=sys.stderr)


def send_and_print_answer(chat: ChatSession, text: str, out: TextIO) -> int:
    answer = chat.stream_answer(text)
    try:
        for piece in answer:
            print(piece, end="", file=out, flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="", file=out)
    except QuireError as error:
        _print_error(str(error))
        return 1
    finally:
        answer.close()
        print(file=out, flush=True)
    return 0
