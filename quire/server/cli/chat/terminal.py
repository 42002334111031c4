"""A chat at a terminal: lines are edited by prompt_toolkit, answers drawn by rich."""

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

from quire.engine.errors import QuireError
from quire.server.cli.chat.commands import COMMANDS, obey
from quire.server.cli.chat.conversation import Chat
from quire.server.cli.chat.markdown import show


def converse(chat: Chat, console: Console) -> int:
    """Until Ctrl-D or /exit. Returns 1 if the last request was refused."""
    session: PromptSession[str] = PromptSession(
        history=_history(),
        multiline=True,
        key_bindings=_keys(),
        prompt_continuation=lambda width, line, wrapped: " " * width,
        completer=WordCompleter([*COMMANDS], sentence=True),
        complete_while_typing=False,
    )
    tell, refuse = (partial(console.print, style=style, markup=False, highlight=False) for style in ("dim", "red"))
    status, draft = 0, ""
    while True:
        try:
            line = session.prompt(HTML("<ansicyan><b>&gt; </b></ansicyan>"), default=draft).strip()
        except KeyboardInterrupt:  # what was typed is dropped
            draft = ""
            console.print("[dim]/exit or Ctrl-D to leave[/]")
            continue
        except EOFError:
            return status
        outcome = obey(chat, line, tell, refuse)
        if outcome.leave:
            return status
        draft = outcome.edit or ""
        if outcome.ask:
            status = _say(chat, outcome.ask, console)


def _say(chat: Chat, text: str, console: Console) -> int:
    answer = chat.answer(text)
    try:
        with unseen_keys():
            show(console, answer, "thinking")
        if chat.cut:
            console.print("[dim]cut at max tokens[/]")
    except KeyboardInterrupt:
        console.print("[dim]stopped; /retry asks again[/]")
    except QuireError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    finally:
        answer.close()
        console.print()
    return 0


def _keys() -> KeyBindings:
    """Enter sends, but behind a backslash; Alt+Enter begins another line."""
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


def _history() -> History:
    """What was typed, for the next time too; readable by its user alone. In memory where no file can be written."""
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
def unseen_keys() -> Iterator[None]:
    """What is typed meanwhile is not shown now, but where the next message is typed."""
    there = sys.stdin.fileno()
    before = termios.tcgetattr(there)
    quiet = termios.tcgetattr(there)
    quiet[3] &= ~(termios.ECHO | termios.ICANON)  # signals, as of Ctrl-C, stay
    termios.tcsetattr(there, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(there, termios.TCSANOW, before)
