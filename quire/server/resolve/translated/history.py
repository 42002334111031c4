"""The items that precede a request of the Responses API: those of earlier responses or of a conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.engine import random_source
from quire.engine.errors import InvalidRequest
from quire.server.encoding import encode_json
from quire.server.protocol.bounds import MAX_MESSAGES
from quire.server.protocol.items import CallOutput, ImageContent, Item, Message, MessagePart, Reasoning, TextContent
from quire.server.resolve.checks import check_texts
from quire.server.store.store import Bounds, Reader, check_room, reading
from quire.server.store.store import Item as StoredItem

MAX_ITEMS = 10_000
"""Of a conversation, and of an input that is stored: some thousand turns of an agent with its calls."""
MAX_ADDED_ITEMS = 1_000
"""Of an input that is added to a conversation, in one transaction: nobody may see a part of it."""
CONVERSATION = Bounds(MAX_ITEMS, 16 << 20)
"""As many bytes as one body may have by default: a response that names a conversation reads all of it."""
MAX_BEFORE_BYTES = 16 << 20
"""The same of the responses before one."""
MAX_INPUT_BYTES = 4 << 20
"""Of all items that a request adds to the store; the text of a million tokens."""
ENDED = ("completed", "incomplete")
RESPONSE, PLACE = "resp_", 4
"""What a response's id begins with; an id of one of its items has what follows, and so many digits for its place."""
IDS = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "custom_tool_call": "ctc_",
    "function_call_output": "fco_",
    "custom_tool_call_output": "ctco_",
}
"""What ids begin with, by the type of item."""


def before(folder: Path, owner: str, response_id: str) -> list[Any]:
    """The items of a response and of all before it, the oldest first. Raises InvalidRequest."""
    found: list[list[Any]] = []
    next_id: str | None = response_id
    count = size = 0
    with reading(folder) as stored:
        while next_id is not None:
            known = stored.known(owner, "response", next_id)
            if known is None:
                raise _refused(f"the response `{next_id}` is not stored here, or not any more")
            if known.about["status"] not in ENDED:
                raise _refused(f"the response `{next_id}` is {known.about['status']}")
            size += known.size
            if size > MAX_BEFORE_BYTES:
                raise _refused(f"more than {MAX_BEFORE_BYTES} bytes come before")
            found.append([*stored.items(owner, next_id), *_output(stored, owner, next_id)])
            count += len(found[-1])
            if count > MAX_MESSAGES:
                raise _refused(f"more than {MAX_MESSAGES} items come before")
            next_id = known.about["previous"]
    return [item for items in reversed(found) for item in items]


def _output(stored: Reader, owner: str, response_id: str) -> list[Any]:
    response = stored.get(owner, "response", response_id)
    return [] if response is None else list(json.loads(response.data)["output"])


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"previous_response_id: {why}", param="previous_response_id")


def in_conversation(folder: Path, owner: str, conversation_id: str) -> list[Any]:
    """The items of a conversation. Raises InvalidRequest."""
    with reading(folder) as stored:
        known = stored.known(owner, "conversation", conversation_id)
        if known is None:
            raise InvalidRequest(f"conversation: `{conversation_id}` is not stored here", param="conversation")
        check_room(known, (), CONVERSATION, "conversation")
        return stored.items(owner, conversation_id)


def referred(folder: Path, owner: str, ids: Sequence[str], near: Sequence[Any]) -> dict[str, Any]:
    """Stored items by their ids: of those `near`, or of the responses that made them. Raises InvalidRequest."""
    known = {item["id"]: item for item in near}
    size = 0
    with reading(folder) as stored:
        for id in ids:
            if id not in known:
                response_id = RESPONSE + id.partition("_")[2][:-PLACE]
                found = stored.known(owner, "response", response_id)
                size += 0 if found is None else found.length
                if size > MAX_BEFORE_BYTES:
                    raise InvalidRequest(f"input: refers to more than {MAX_BEFORE_BYTES} bytes", param="input")
                known |= {item["id"]: item for item in _output(stored, owner, response_id)}
            if id not in known:
                raise InvalidRequest(f"input: the item `{id}` is not stored here, or not any more", param="input")
    return known


def kept_items(items: Sequence[Item], param: str, *, conversation: bool = False) -> list[StoredItem]:
    """Items of an input as they are stored and given back, each with an id. `conversation`: they are added to one.
    Raises InvalidRequest."""
    if conversation and len(items) > MAX_ADDED_ITEMS:
        message = f"{param}: a request adds at most {MAX_ADDED_ITEMS} items to a conversation, got {len(items)}"
        raise InvalidRequest(message, param=param)
    if len(items) > MAX_ITEMS:
        raise InvalidRequest(f"{param}: at most {MAX_ITEMS} items are stored: pass store false", param=param)
    kept, size = [], 0
    for item in items:
        fields = _kept(item)
        try:
            kept.append(StoredItem(fields["id"], encode_json(fields)))
        except UnicodeEncodeError:
            check_texts(fields, param)
            raise
        size += len(kept[-1].data)
        if size > MAX_INPUT_BYTES:
            raise InvalidRequest(f"{param}: at most {MAX_INPUT_BYTES} bytes are stored: pass store false", param=param)
    return kept


def _kept_part(part: MessagePart, kind: str, **more: Any) -> dict[str, Any]:
    """A part of a content; text gets this `kind`."""
    return part.model_dump() if isinstance(part, ImageContent) else {"type": kind, "text": part.text, **more}


def _kept(item: Item) -> dict[str, Any]:
    fields = item.model_dump(exclude_defaults=False)
    if isinstance(item, Message):
        kind = "output_text" if item.role == "assistant" else "input_text"
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if item.role == "assistant" else {}
        parts = [TextContent(type="text", text=item.content)] if isinstance(item.content, str) else item.content
        fields["content"] = [_kept_part(part, kind, **more) for part in parts]
    elif isinstance(item, CallOutput) and not isinstance(item.output, str):
        fields["output"] = [_kept_part(part, "input_text") for part in item.output]
    elif isinstance(item, Reasoning):
        fields["encrypted_content"] = item.encrypted_content or None
    if not fields.get("namespace"):
        fields.pop("namespace", None)
    return {**fields, "id": IDS[item.type] + random_source.token_hex(16), "status": "completed"}
