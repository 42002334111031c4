"""Slash commands of `quire chat`."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.engine.common.errors import ConfigError, QuireError
from quire.engine.unsupported_options import suggest_nearest
from quire.server.cli.chat.chat_session import ChatSession, message_text
from quire.server.cli.server_client import check_model_name, fetch_model_names

COMMANDS = {
    "/retry": "answer the last message again",
    "/undo": "forget the last message and its answer",
    "/edit": "change the last message and ask again (/edit TEXT: to TEXT)",
    "/image": "send a picture with the next message (/image FILE)",
    "/save": "write the conversation to a file (/save FILE)",
    "/load": "go on with one (/load FILE)",
    "/set": "change a sampling setting (/set temperature 0.7; /set temperature: the default; /set: show all)",
    "/model": "switch to another model (/model NAME; /model: list them)",
    "/system": "set the system message and start over (no TEXT: remove it)",
    "/reset": "forget the conversation",
    "/help": "this list",
    "/exit": "leave (or Ctrl-D)",
}
COMMAND_HELP = "\n".join(f"{name:<9} {text}" for name, text in COMMANDS.items())
KEY_HELP = """\
Alt+Enter, or \\ at a line's end, begins another line; pasted text is sent when you press Enter.
Ctrl-C stops an answer."""


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    message: str = ""
    prompt: str | None = None
    draft: str | None = None
    should_exit: bool = False


def handle_line(
    chat: ChatSession, line: str, print_info: Callable[[str], object], print_error: Callable[[str], object]
) -> CommandOutcome:
    if not line.startswith("/"):
        return CommandOutcome(prompt=line)
    try:
        outcome = _run_command(chat, line)
    except QuireError as error:
        print_error(str(error))
        return CommandOutcome()
    if outcome.message:
        print_info(outcome.message)
    return outcome


def _run_command(chat: ChatSession, line: str) -> CommandOutcome:
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    match command:
        case "/exit" | "/quit" | "/bye":
            return CommandOutcome(should_exit=True)
        case "/help":
            return CommandOutcome(f"{COMMAND_HELP}\n{KEY_HELP}")
        case "/retry" | "/undo" | "/edit":
            return _retry_undo_or_edit(chat, command, rest)
        case "/image":
            return _attach_image(chat, rest)
        case "/save" | "/load":
            return _save_or_load(chat, command, rest)
        case "/set":
            return _set_option(chat, rest)
        case "/model":
            return _switch_model(chat, rest)
        case "/reset" | "/system":
            chat.messages.clear()
            chat.pending_images.clear()
            if command == "/reset":
                return CommandOutcome("forgot the conversation")
            chat.system = rest or None
            return CommandOutcome(f"a new conversation, {'with that' if rest else 'without a'} system message")
    advice = suggest_nearest(command, COMMANDS) or "/help lists them"
    return CommandOutcome(f"{command}: no such command; {advice}")


def _retry_undo_or_edit(chat: ChatSession, command: str, rest: str) -> CommandOutcome:
    text = chat.undo_last_turn()
    if text is None:
        return CommandOutcome(f"{command}: there are no messages yet")
    if command == "/retry":
        return CommandOutcome(prompt=text)
    if command == "/undo":
        chat.pending_images.clear()
        return CommandOutcome(f"forgot: {text if len(text) < 60 else text[:59] + '…'}")
    return CommandOutcome(prompt=rest) if rest else CommandOutcome(draft=text)


def _attach_image(chat: ChatSession, rest: str) -> CommandOutcome:
    if not rest:
        return CommandOutcome("/image needs a file's name")
    chat.pending_images.append(image_data_url(rest))
    count = len(chat.pending_images)
    return CommandOutcome(f"{'a picture goes' if count == 1 else f'{count} pictures go'} with the next message")


def _save_or_load(chat: ChatSession, command: str, rest: str) -> CommandOutcome:
    if not rest:
        return CommandOutcome(f"{command} needs a file's name")
    if command == "/save":
        chat.save_conversation(Path(rest))
        return CommandOutcome(f"{len(chat.messages)} messages are in {rest}")
    chat.load_conversation(Path(rest))
    end = chat.messages[-1] if chat.messages else None
    last = "" if end is None else f"; the last one, of the {end['role']}:\n{message_text(end['content'])}"
    return CommandOutcome(f"{len(chat.messages)} messages; {chat.model} goes on{last}")


def _set_option(chat: ChatSession, rest: str) -> CommandOutcome:
    name, _, value = rest.replace("=", " ", 1).partition(" ")
    name = name.replace("-", "_")
    if not name:
        return CommandOutcome(
            "\n".join(f"{name} = {json.dumps(value)}" for name, value in chat.options.items()) or "all defaults"
        )
    if name in ("model", "messages", "stream"):
        return CommandOutcome(f"{name} cannot be set; /help lists the commands")
    if not value.strip():
        chat.options.pop(name, None)
        return CommandOutcome(f"{name}: the default")
    from quire.server.protocol.chat import ChatRequest  # slow to import

    if name not in (known := ChatRequest.model_fields) and (advice := suggest_nearest(name, known)):
        return CommandOutcome(f"{name}: no such parameter; {advice}")
    parsed_value = _parse_value(value.strip())
    if name in known:
        _check_option(name, parsed_value)
    chat.options[name] = parsed_value
    return CommandOutcome(f"{name} = {json.dumps(chat.options[name])}")


def _check_option(name: str, value: Any) -> None:
    """Raises InvalidRequest for values that the API refuses."""
    from quire.engine.common.request_params import SamplingParams, find_sampling_field
    from quire.server.protocol.chat import ChatRequest
    from quire.server.resolve.parse import validate_body

    body = validate_body({"messages": [{"role": "user", "content": ""}], name: value}, ChatRequest)
    row = find_sampling_field(name)
    if row is not None and row.field.minimum is not None and (number := getattr(body, name)) is not None:
        SamplingParams(**{"max_tokens": None, name: number})


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _switch_model(chat: ChatSession, rest: str) -> CommandOutcome:
    known = fetch_model_names(chat.http)
    if not rest:
        return CommandOutcome("\n".join(f"{'*' if name == chat.model else ' '} {name}" for name in known))
    chat.model = check_model_name(known, rest)
    return CommandOutcome(f"{rest} goes on")


def image_data_url(name: str) -> str:
    """`name` is a path as typed or as dropped on a terminal, so it may be quoted or escaped. Raises ConfigError or
    InvalidRequest.
    """
    from quire.engine.images.image_decoding import (  # images are rare
        MAX_FILE_BYTES,
        open_image,
    )

    quoted = len(name) > 1 and name[0] == name[-1] and name[0] in "'\""
    path = Path(name[1:-1] if quoted else name.replace("\\ ", " ")).expanduser()
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    kind = open_image(content, str(path)).format or ""
    return f"data:image/{kind.lower()};base64,{base64.b64encode(content).decode()}"
