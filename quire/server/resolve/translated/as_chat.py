"""The chat that a body of another API is translated to: its turns in the form that templates take, and error messages
in the words of that API."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from quire.engine.errors import InvalidRequest
from quire.engine.images.decode import head_of
from quire.engine.text.conversation.literal import encode_literally
from quire.server.config import ServerConfig
from quire.server.images.asked import NeedsImages
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.common import ADAPTED, adapted_header
from quire.server.resolve.checks import check_text
from quire.server.resolve.common import Resolved
from quire.server.resolve.prompts import rendered, summary, with_images
from quire.server.resolve.tools import tool_use
from quire.server.served_model import ServedModel

Places = dict[str, str]
"""The caller's names of images' fields, by the names that a chat has for them."""
Turn = dict[str, Any]
FIELD = "\0field"
"""The key under which a turn, and an image's part, holds the caller's name of its field, until `placed` takes it out;
no JSON has such a key."""


@contextmanager
def named_by_caller(names: Mapping[str, str]) -> Iterator[Places]:
    """Renames fields in errors that the block raises, from a chat's names to the caller's: by `names`, and by the
    places that `placed` notes in what this yields."""
    places: Places = {}
    try:
        yield places
    except NeedsImages as needed:
        needed.urls = {url: places.get(where, where) for url, where in needed.urls.items()}
        raise
    except InvalidRequest as error:
        where, _, why = error.message.partition(": ")
        if where in places:
            error.message, error.param = f"{places[where]}: {why}", head_of(places[where])
        else:
            error.message = in_words_of_caller(error.message, error.param, names)
            error.param = names.get(error.param or "", error.param)
        error.args = (error.message,)
        raise


def in_own_words(call: Resolved, names: Mapping[str, str], places: Places | None = None) -> Resolved:
    """The call, with the caller's names of the fields that its grammars come from, and of what was adapted."""
    if places and (adapted := call.spec.headers.get(ADAPTED)):
        headers = {**call.spec.headers, ADAPTED: adapted_places(adapted, places)}
        call = replace(call, spec=replace(call.spec, headers=headers))
    grammars = [(names.get(param, param), grammar) for param, grammar in call.grammars]
    return replace(call, grammars=grammars, names=names)


def adapted_places(adapted: str, places: Places) -> str:
    """What was adapted, with the caller's names of the places."""
    return re.sub(r"messages\[\d+\]", lambda found: places.get(found[0], found[0]), adapted)


def in_words_of_caller(message: str, param: str | None, names: Mapping[str, str]) -> str:
    """The message with its parameter's own name, and that of paths, which cannot be words of the text."""
    for name, own in names.items():
        if name == param or "." in name:
            message = re.sub(rf"\b{re.escape(name)}\b", own, message)
    return message


def image_part(url: str, field: str, **more: str) -> Turn:
    """A chat's content part, of an image that the caller has in `field`."""
    return {"type": "image_url", "image_url": {"url": url, **more}, FIELD: field}


def add_parts(turns: list[Turn], role: str, given: Sequence[Turn]) -> None:
    """Add parts to the last turn, or to a new one where that is another role's."""
    if not turns or turns[-1]["role"] != role:
        turns.append({"role": role, "content": []})
    turns[-1]["content"] += given


def note_field(turns: Sequence[Turn], field: str) -> None:
    """Note where the caller has the turns that have no place yet."""
    for turn in reversed(turns):
        if FIELD in turn:
            return
        turn[FIELD] = field


def tool_turn(call_id: str, content: str | list[Turn], names: Mapping[str, str]) -> Turn:
    """What a tool returned. `names`: of the functions that were called, by the ids of the calls."""
    turn = {"role": "tool", "tool_call_id": call_id, "content": content}
    return {**turn, "name": names[call_id]} if call_id in names else turn


def placed(turns: Sequence[Turn], places: Places) -> list[Turn]:
    """The turns, those of a user behind one another as one. `places` receives where the caller has each turn and its
    images. Content is a list of parts, or a tool's text."""
    found: list[Turn] = []
    for turn in turns:
        if turn["role"] == "user" and found and found[-1]["role"] == "user":
            found[-1] = {**found[-1], "content": [*found[-1]["content"], *turn["content"]]}
        else:
            found.append(dict(turn))
    for index, turn in enumerate(found):
        if field := turn.pop(FIELD, None):
            places[f"messages[{index}]"] = field
        for place, part in enumerate(turn["content"] if isinstance(turn["content"], list) else ()):
            if field := part.pop(FIELD, None):
                places[f"messages[{index}].content[{place}].image_url.url"] = field
    return found


def prompt_tokens(
    chat: ChatRequest, model: ServedModel, config: ServerConfig, places: Places
) -> tuple[int, dict[str, str]]:
    """How many the prompt has that a chat makes, and headers of the answer. Raises InvalidRequest."""
    shown = tool_use(chat, model.formats.tools).shown
    made = rendered(chat, model, shown, trusted=config.trust_request_chat_template)
    text = with_images(made.text, chat.messages, model)
    check_text(text, "messages")
    ids = encode_literally(model.tokenizer, text, made.moved, add_special_tokens=chat.add_special_tokens)
    return len(ids), adapted_header(adapted_places(summary(made), places))
