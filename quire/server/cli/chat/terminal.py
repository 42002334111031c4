from __future__ import annotations

import os
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console

from quire.engine.common.errors import QuireError
from quire.server.cli.chat.chat_session import ChatSession
from quire.server.cli.chat.commands import COMMANDS, handle_line
from quire.server.cli.chat.markdown import print_stream


def chat_in_terminal(chat: ChatSession, console: Console) -> int:
    session: PromptSession[str] = PromptSession(
        history=_open_history(),
        multiline=True,
        key_bindings=_key_bindings(),
        prompt_continuation=lambda width, line, wrapped: " " * width,
        completer=WordCompleter([*COMMANDS], sentence=True),
        complete_while_typing=False,
    )
    tell, refuse = (partial(console.print, style=style, markup=False, highlight=False) for style in ("dim", "red"))
    status, draft = 0, ""
    while True:
        try:
            line = session.prompt(HTML("<ansicyan><b>&gt; </b></ansicyan>"), default=draft).strip()
        except KeyboardInterrupt:
            draft = ""
            console.print("[dim]/exit or Ctrl-D to leave[/]")
            continue
        except EOFError:
            return status
        outcome = handle_line(chat, line, tell, refuse)
        if outcome.should_exit:
            return status
        draft = outcome.draft or ""
        if outcome.prompt:
            status = _send_and_print_answer(chat, outcome.prompt, console)


def _send_and_print_answer(chat: ChatSession, text: str, console: Console) -> int:
    answer = chat.stream_answer(text)
    try:
        with hide_typed_keys():
            print_stream(console, answer, "thinking")
        if chat.was_truncated:
            console.print(f"[dim]{chat.truncation_notice}[/]")
    except KeyboardInterrupt:
        console.print("[dim]stopped; /retry asks again[/]")
    except QuireError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    finally:
        answer.close()
        console.print()
    return chat.answer_status


def _key_bindings() -> KeyBindings:
    """Enter sends the text, except after a backslash; Alt+Enter begins a new line."""
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


def _open_history() -> History:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    path = Path(state).expanduser() / "quire" / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        with path.open("ab"):
            return FileHistory(str(path))
    except (OSError, RuntimeError):
        return InMemoryHistory()


@contextmanager
def hide_typed_keys() -> Iterator[None]:
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    hidden = termios.tcgetattr(descriptor)
    hidden[3] &= ~(termios.ECHO | termios.ICANON)  # Ctrl-C still works
    termios.tcsetattr(descriptor, termios.TCSANOW, hidden)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
