"""Items of earlier responses or a conversation, from the store or a WebSocket's memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.engine.common import random_source
from quire.engine.common.errors import InvalidRequest, PreviousResponseNotFound
from quire.server.encoding import encode_json
from quire.server.protocol.field_limits import MAX_MESSAGES
from quire.server.protocol.response_items import (
    CallOutput,
    ImageContent,
    InputItem,
    Message,
    MessagePart,
    Reasoning,
    TextContent,
)
from quire.server.resolve.checks import check_json_no_surrogates
from quire.server.store.response_store import (
    ConversationLimits,
    StoreReader,
    check_conversation_limits,
    open_store_reader,
)
from quire.server.store.response_store import StoredItem as StoredItem

NO_STORE_MESSAGE = "this server stores no responses; the operator may pass --data-dir"
MAX_ITEMS = 10_000
"""Limit for a conversation or a stored input: some thousand agent turns with calls."""
MAX_ADDED_ITEMS = 1_000
"""Limit per request, because one transaction adds its items to a conversation."""
CONVERSATION_BOUNDS = ConversationLimits(MAX_ITEMS, 16 << 20)
"""A response reads its whole conversation, so the limit in bytes is the default limit of a body."""
MAX_HISTORY_BYTES = 16 << 20
MAX_INPUT_BYTES = 4 << 20
"""Limit for the items that a request stores, about the text of a million tokens."""
ENDED_STATUSES = ("completed", "incomplete")
RESPONSE_ID_PREFIX, PLACE_DIGITS = "resp_", 4
ITEM_ID_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "custom_tool_call": "ctc_",
    "function_call_output": "fco_",
    "custom_tool_call_output": "ctco_",
}


@dataclass(frozen=True, slots=True)
class CachedResponse:
    id: str
    items: tuple[bytes, ...]
    """JSON of its own items and of all earlier ones, oldest first."""
    is_stored: bool

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.items))

    def parse_items(self) -> list[Any]:
        """Raises InvalidRequest beyond the limits of `response_history`."""
        check_history_size(self.num_bytes, len(self.items))
        return [json.loads(item) for item in self.items]


@dataclass(frozen=True, slots=True)
class WebSocketHistory:
    """What the next request on a WebSocket may continue without the store."""

    previous: CachedResponse | None

    @property
    def continues_unstored_response(self) -> bool:
        return self.previous is not None and not self.previous.is_stored

    @property
    def num_bytes(self) -> int:
        return 0 if self.previous is None else self.previous.num_bytes


def response_history(folder: Path, owner: str, response_id: str) -> list[Any]:
    """Returns the items of the response and all earlier responses, oldest first."""
    item_groups: list[list[Any]] = []
    next_id: str | None = response_id
    count = size = 0
    with open_store_reader(folder) as stored:
        while next_id is not None:
            known = stored.read_summary(owner, "response", next_id)
            if known is None:
                raise previous_response_not_found(next_id)
            if known.about["status"] not in ENDED_STATUSES:
                raise _history_error(f"the response `{next_id}` is {known.about['status']}")
            size += known.size
            check_history_size(size, count)
            item_groups.append([*stored.read_items(owner, next_id), *_response_output(stored, owner, next_id)])
            count += len(item_groups[-1])
            check_history_size(size, count)
            next_id = known.about["previous"]
    return [item for items in reversed(item_groups) for item in items]


def _response_output(stored: StoreReader, owner: str, response_id: str) -> list[Any]:
    response = stored.read_object_without_items(owner, "response", response_id)
    return [] if response is None else list(json.loads(response.data)["output"])


def check_history_size(num_bytes: int, num_items: int) -> None:
    """Raises InvalidRequest."""
    if num_bytes > MAX_HISTORY_BYTES:
        raise _history_error(f"more than {MAX_HISTORY_BYTES} bytes precede it")
    if num_items > MAX_MESSAGES:
        raise _history_error(f"more than {MAX_MESSAGES} items precede it")


def previous_response_not_found(response_id: str) -> PreviousResponseNotFound:
    message = f"previous_response_id: the response `{response_id}` is not stored here, or it has expired"
    return PreviousResponseNotFound(message, param="previous_response_id")


def _history_error(why: str) -> InvalidRequest:
    return InvalidRequest(f"previous_response_id: {why}", param="previous_response_id")


def conversation_items(folder: Path, owner: str, conversation_id: str) -> list[Any]:
    with open_store_reader(folder) as stored:
        known = stored.read_summary(owner, "conversation", conversation_id)
        if known is None:
            raise InvalidRequest(f"conversation: `{conversation_id}` is not stored here", param="conversation")
        check_conversation_limits(known, (), CONVERSATION_BOUNDS, "conversation")
        return stored.read_items(owner, conversation_id)


def load_referenced_items(
    folder: Path | None, owner: str, ids: Sequence[str], nearby_items: Sequence[Any]
) -> dict[str, Any]:
    known = {item["id"]: item for item in nearby_items}
    if folder is None:
        if missing := [id for id in ids if id not in known]:
            raise InvalidRequest(f"input: the item `{missing[0]}` is unknown: {NO_STORE_MESSAGE}", param="input")
        return known
    size = 0
    with open_store_reader(folder) as stored:
        for id in ids:
            if id not in known:
                response_id = RESPONSE_ID_PREFIX + id.partition("_")[2][:-PLACE_DIGITS]
                response = stored.read_summary(owner, "response", response_id)
                size += 0 if response is None else response.length
                if size > MAX_HISTORY_BYTES:
                    raise InvalidRequest(f"input: refers to more than {MAX_HISTORY_BYTES} bytes", param="input")
                known |= {item["id"]: item for item in _response_output(stored, owner, response_id)}
            if id not in known:
                raise InvalidRequest(f"input: the item `{id}` is not stored here, or it has expired", param="input")
    return known


def to_stored_items(
    items: Sequence[InputItem],
    param: str,
    *,
    in_conversation: bool = False,
    max_bytes: int | None = None,
) -> list[StoredItem]:
    max_bytes = MAX_INPUT_BYTES if max_bytes is None else max_bytes
    if in_conversation and len(items) > MAX_ADDED_ITEMS:
        message = f"{param}: a request adds at most {MAX_ADDED_ITEMS} items to a conversation, got {len(items)}"
        raise InvalidRequest(message, param=param)
    if len(items) > MAX_ITEMS:
        raise InvalidRequest(f"{param}: at most {MAX_ITEMS} items are stored: pass store false", param=param)
    stored_items, size = [], 0
    for item in items:
        fields = _make_stored_item_fields(item)
        try:
            stored_items.append(StoredItem(fields["id"], encode_json(fields)))
        except UnicodeEncodeError:
            check_json_no_surrogates(fields, param)
            raise
        size += len(stored_items[-1].data)
        if size > max_bytes:
            raise InvalidRequest(f"{param}: at most {max_bytes} bytes are stored: pass store false", param=param)
    return stored_items


def to_cached_items(items: Sequence[InputItem]) -> list[StoredItem] | None:
    try:
        return to_stored_items(items, "input", max_bytes=MAX_HISTORY_BYTES)
    except InvalidRequest:
        return None


def _stored_part(part: MessagePart, kind: str, **more: Any) -> dict[str, Any]:
    return part.model_dump() if isinstance(part, ImageContent) else {"type": kind, "text": part.text, **more}


def _make_stored_item_fields(item: InputItem) -> dict[str, Any]:
    fields = item.model_dump(exclude_defaults=False)
    if isinstance(item, Message):
        kind = "output_text" if item.role == "assistant" else "input_text"
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if item.role == "assistant" else {}
        parts = [TextContent(type="text", text=item.content)] if isinstance(item.content, str) else item.content
        fields["content"] = [_stored_part(part, kind, **more) for part in parts]
    elif isinstance(item, CallOutput) and not isinstance(item.output, str):
        fields["output"] = [_stored_part(part, "input_text") for part in item.output]
    elif isinstance(item, Reasoning):
        fields["encrypted_content"] = item.encrypted_content or None
    if not fields.get("namespace"):
        fields.pop("namespace", None)
    return {**fields, "id": ITEM_ID_PREFIXES[item.type] + random_source.token_hex(16), "status": "completed"}
