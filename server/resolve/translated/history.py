"""What came before a request of the Responses API: the items of earlier responses, or of a conversation."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.engine.errors import InvalidRequest
from quire.server.protocol.bounds import MAX_MESSAGES
from quire.server.protocol.items import CallOutput, Item, Message, Reasoning
from quire.server.resolve.checks import check_texts
from quire.server.store import reading

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
    count = 0
    with reading(folder) as get:
        while next_id is not None:
            kept = get(owner, next_id)
            if kept is None or "response" not in kept:
                raise _refused(f"the response `{next_id}` is not stored here, or not any more")
            if kept["response"]["status"] not in ENDED:
                raise _refused(f"the response `{next_id}` is {kept['response']['status']}")
            found.append([*kept["input"], *kept["response"]["output"]])
            count += len(found[-1])
            if count > MAX_MESSAGES:
                raise _refused(f"more than {MAX_MESSAGES} items come before")
            next_id = kept["previous"]
    return [item for items in reversed(found) for item in items]


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"previous_response_id: {why}", param="previous_response_id")


def in_conversation(folder: Path, owner: str, conversation_id: str) -> list[Any]:
    """The items of a conversation. Raises InvalidRequest."""
    with reading(folder) as get:
        kept = get(owner, conversation_id)
    if kept is None or "items" not in kept:
        raise InvalidRequest(f"conversation: `{conversation_id}` is not stored here", param="conversation")
    return list(kept["items"])


def referred(folder: Path, owner: str, ids: Sequence[str], near: Sequence[Any]) -> dict[str, Any]:
    """Stored items by their ids: of those `near`, or of the responses that made them. Raises InvalidRequest."""
    known = {item["id"]: item for item in near}
    with reading(folder) as get:
        for id in ids:
            kept = None if id in known else get(owner, RESPONSE + id.partition("_")[2][:-PLACE])
            if kept is not None and "response" in kept:
                known |= {item["id"]: item for item in kept["response"]["output"]}
            if id not in known:
                raise InvalidRequest(f"input: the item `{id}` is not stored here, or not any more", param="input")
    return known


def kept_items(items: Sequence[Item], param: str) -> list[dict[str, Any]]:
    """Items of an input as they are stored and given back, each with an id. Raises InvalidRequest."""
    kept = [_kept(item) for item in items]
    check_texts(kept, param)
    return kept


def _kept(item: Item) -> dict[str, Any]:
    fields = item.model_dump(exclude_defaults=False)
    if isinstance(item, Message):
        kind = "output_text" if item.role == "assistant" else "input_text"
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if item.role == "assistant" else {}
        texts = [item.content] if isinstance(item.content, str) else [part.text for part in item.content]
        fields["content"] = [{"type": kind, "text": text, **more} for text in texts]
    elif isinstance(item, CallOutput) and not isinstance(item.output, str):
        fields["output"] = [{"type": "input_text", "text": part.text} for part in item.output]
    elif isinstance(item, Reasoning):
        fields["encrypted_content"] = item.encrypted_content or None
    if not fields.get("namespace"):
        fields.pop("namespace", None)
    return {**fields, "id": IDS[item.type] + secrets.token_hex(16), "status": "completed"}
