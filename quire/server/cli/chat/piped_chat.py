from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import TextIO

from quire.engine.common.errors import QuireError
from quire.server.cli.chat.chat_session import ChatSession
from quire.server.cli.chat.commands import handle_line


def chat_over_pipes(chat: ChatSession, program: str, stdin: TextIO, out: TextIO) -> int:
    """Returns the last answer's status. Errors begin with `program`."""
    status = 0
    for line in _read_messages(stdin):
        outcome = handle_line(chat, line, partial(print, file=out), partial(_print_error, program))
        if outcome.should_exit:
            break
        if outcome.draft is not None:
            print("/edit needs the new text here", file=out)
        if outcome.prompt is not None:
            status = send_and_print_answer(chat, program, outcome.prompt, out)
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


def _print_error(program: str, why: str) -> None:
    print(f"{program}: {why}", file=sys.stderr)


def send_and_print_answer(chat: ChatSession, program: str, text: str, out: TextIO) -> int:
    """Returns 1 for errors, and for incomplete answers in a format. Errors begin with `program`."""
    answer = chat.stream_answer(text)
    try:
        for piece in answer:
            print(piece, end="", file=out, flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="", file=out)
    except QuireError as error:
        _print_error(program, str(error))
        return 1
    finally:
        answer.close()
        print(file=out, flush=True)
    if chat.was_truncated:
        _print_error(program, chat.truncation_notice)
    return chat.answer_status
