"""The commands of `quire chat`: each line that begins with a slash."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.engine.advice import nearest
from quire.engine.errors import ConfigError, QuireError
from quire.server.cli.chat.conversation import Chat, text_of
from quire.server.cli.connect import models, served_model

COMMANDS = {
    "/retry": "answer the last message again",
    "/undo": "forget the last message and its answer",
    "/edit": "change the last message and ask again (/edit TEXT: to TEXT)",
    "/image": "send a picture with the next message (/image FILE)",
    "/save": "write the conversation to a file (/save FILE)",
    "/load": "go on with one (/load FILE)",
    "/set": "what answers are asked with (/set temperature 0.7; /set temperature: the default; /set: all)",
    "/model": "which model is asked (/model NAME; /model: which there are)",
    "/system": "set the system message and begin anew (no TEXT: remove it)",
    "/reset": "forget the conversation",
    "/help": "this list",
    "/exit": "leave (or Ctrl-D)",
}
HELP = "\n".join(f"{name:<9} {text}" for name, text in COMMANDS.items())
BOUNDED = (
    *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("max_tokens", "min_tokens", "seed"),
)
"""Parameters whose bounds SamplingParams knows, and not the request's model."""
KEYS = """\
Alt+Enter, or \\ at a line's end, begins another line; what is pasted is sent when you press Enter.
Ctrl-C stops an answer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command leads to."""

    says: str = ""
    ask: str | None = None
    """To be asked now."""
    edit: str | None = None
    """To be put where the user types."""
    leave: bool = False


def obey(chat: Chat, line: str, tell: Callable[[str], object], refuse: Callable[[str], object]) -> Outcome:
    """What is left to do of a line, which is a message or, with a slash, a command that is performed. `tell` and
    `refuse` show what comes of it, or why it cannot be done."""
    if not line.startswith("/"):
        return Outcome(ask=line)
    try:
        outcome = _perform(chat, line)
    except QuireError as error:
        refuse(str(error))
        return Outcome()
    if outcome.says:
        tell(outcome.says)
    return outcome


def _perform(chat: Chat, line: str) -> Outcome:
    """Raises QuireError for what cannot be done."""
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    match command:
        case "/exit" | "/quit" | "/bye":  # the last is Ollama's word
            return Outcome(leave=True)
        case "/help":
            return Outcome(f"{HELP}\n{KEYS}")
        case "/retry" | "/undo" | "/edit":
            return _back(chat, command, rest)
        case "/image":
            return _image(chat, rest)
        case "/save" | "/load":
            return _file(chat, command, rest)
        case "/set":
            return _set(chat, rest)
        case "/model":
            return _model(chat, rest)
        case "/reset" | "/system":
            chat.turns.clear()
            chat.images.clear()
            if command == "/reset":
                return Outcome("forgot the conversation")
            chat.system = rest or None
            return Outcome(f"a new conversation, {'with that' if rest else 'without a'} system message")
    advice = nearest(command, COMMANDS) or "/help lists them"
    return Outcome(f"{command}: no such command; {advice}")


def _back(chat: Chat, command: str, rest: str) -> Outcome:
    text = chat.take_back()
    if text is None:
        return Outcome(f"{command}: nothing was said yet")
    if command == "/retry":
        return Outcome(ask=text)
    if command == "/undo":
        chat.images.clear()
        return Outcome(f"forgot: {text if len(text) < 60 else text[:59] + '…'}")
    return Outcome(ask=rest) if rest else Outcome(edit=text)


def _image(chat: Chat, rest: str) -> Outcome:
    if not rest:
        return Outcome("/image needs a file's name")
    chat.images.append(data_url(rest))
    count = len(chat.images)
    return Outcome(f"{'a picture goes' if count == 1 else f'{count} pictures go'} with the next message")


def _file(chat: Chat, command: str, rest: str) -> Outcome:
    if not rest:
        return Outcome(f"{command} needs a file's name")
    if command == "/save":
        chat.save(Path(rest))
        return Outcome(f"{len(chat.turns)} messages are in {rest}")
    chat.load(Path(rest))
    end = chat.turns[-1] if chat.turns else None
    last = "" if end is None else f"; the last one, of the {end['role']}:\n{text_of(end['content'])}"
    return Outcome(f"{len(chat.turns)} messages; {chat.model} goes on{last}")


def _set(chat: Chat, rest: str) -> Outcome:
    name, _, value = rest.replace("=", " ", 1).partition(" ")
    name = name.replace("-", "_")
    if not name:
        return Outcome(
            "\n".join(f"{name} = {json.dumps(value)}" for name, value in chat.options.items()) or "all defaults"
        )
    if name in ("model", "messages", "stream"):
        return Outcome(f"{name} cannot be set; /help lists what can be said")
    if not value.strip():
        chat.options.pop(name, None)
        return Outcome(f"{name}: the default")
    from quire.server.protocol.chat import ChatRequest  # imported only when needed: it is slow

    if name not in (known := ChatRequest.model_fields) and (advice := nearest(name, known)):
        return Outcome(f"{name}: no such parameter; {advice}")
    given = _value(value.strip())
    if name in known:
        _check(name, given)
    chat.options[name] = given
    return Outcome(f"{name} = {json.dumps(chat.options[name])}")


def _check(name: str, value: Any) -> None:
    """Raises InvalidRequest for a value that the API would refuse, by the API's own models."""
    from quire.engine.types import SamplingParams  # imported only when needed: they are slow
    from quire.server.protocol.chat import ChatRequest
    from quire.server.resolve.parse import validated

    body = validated({"messages": [{"role": "user", "content": ""}], name: value}, ChatRequest)
    if name in BOUNDED and (number := getattr(body, name)) is not None:
        SamplingParams(**{"max_tokens": None, name: number})


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _model(chat: Chat, rest: str) -> Outcome:
    known = models(chat.http)
    if not rest:
        return Outcome("\n".join(f"{'*' if name == chat.model else ' '} {name}" for name in known))
    chat.model = served_model(known, rest)
    return Outcome(f"{rest} goes on")


def data_url(name: str) -> str:
    """Of the file `name`, as people type it or drop it on a terminal: in quotes, or with backslashes before spaces.
    Raises ConfigError for one that cannot be read, and InvalidRequest for one that the server would not read."""
    from quire.engine.images.decode import MOST_BYTES, opened  # imported only when needed: pictures are rare

    quoted = len(name) > 1 and name[0] == name[-1] and name[0] in "'\""
    path = Path(name[1:-1] if quoted else name.replace("\\ ", " ")).expanduser()
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    kind = opened(content, str(path)).format or ""
    return f"data:image/{kind.lower()};base64,{base64.b64encode(content).decode()}"
