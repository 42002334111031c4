"""/v1/conversations: OpenAI's Conversations API. A response that names a conversation adds its items to it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from quire.engine.errors import RequestNotFound
from quire.server.access.admission import CountedRoute
from quire.server.protocol.conversations import ConversationRequest, ItemsRequest, MetadataRequest
from quire.server.resolve.translated.conversations import new_conversation, new_items, new_metadata
from quire.server.routes.bodies import documented, worked_on
from quire.server.routes.pages import Limit, Order, page_of
from quire.server.routes.responses import owner_of, store_of
from quire.server.store import Data

router = APIRouter(route_class=CountedRoute)
ONE = "/v1/conversations/{conversation_id}"


@router.post("/v1/conversations", openapi_extra=documented(ConversationRequest))
async def create_conversation(request: Request) -> dict[str, Any]:
    store = store_of(request, "conversation")
    given = await worked_on(request, new_conversation)
    kept = {"id": f"conv_{secrets.token_hex(16)}", "created_at": int(time.time()), **given}
    await asyncio.to_thread(store.put, owner_of(request), kept["id"], kept)
    return _shown(kept)


@router.get(ONE)
async def retrieve_conversation(conversation_id: str, request: Request) -> dict[str, Any]:
    return _shown(await _find(request, conversation_id))


@router.post(ONE, openapi_extra=documented(MetadataRequest))
async def update_conversation(conversation_id: str, request: Request) -> dict[str, Any]:
    """Replace the metadata."""
    metadata = await worked_on(request, new_metadata)
    return _shown(await _change(request, conversation_id, lambda kept: {**kept, "metadata": metadata}))


@router.delete(ONE)
async def delete_conversation(conversation_id: str, request: Request) -> dict[str, Any]:
    """Forget a conversation with its items; its responses stay."""
    await _find(request, conversation_id)
    await asyncio.to_thread(store_of(request, conversation_id).delete, owner_of(request), conversation_id)
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


@router.get(f"{ONE}/items")
async def list_items(
    conversation_id: str, request: Request, limit: Limit = 20, order: Order = "desc", after: str | None = None
) -> dict[str, Any]:
    return page_of((await _find(request, conversation_id))["items"], limit, order, after)


@router.post(f"{ONE}/items", openapi_extra=documented(ItemsRequest))
async def add_items(conversation_id: str, request: Request) -> dict[str, Any]:
    added = await worked_on(request, new_items)
    await _change(request, conversation_id, lambda kept: {**kept, "items": [*kept["items"], *added]})
    return page_of(added, len(added) + 1, "asc", None)


@router.get(f"{ONE}/items/{{item_id}}")
async def retrieve_item(conversation_id: str, item_id: str, request: Request) -> dict[str, Any]:
    kept = await _find(request, conversation_id)
    found = next((item for item in kept["items"] if item["id"] == item_id), None)
    if found is None:
        raise RequestNotFound(f"The conversation has no item `{item_id}`", param="item_id")
    return dict(found)


@router.delete(f"{ONE}/items/{{item_id}}")
async def delete_item(conversation_id: str, item_id: str, request: Request) -> dict[str, Any]:
    await retrieve_item(conversation_id, item_id, request)

    def without(kept: Data) -> Data:
        return {**kept, "items": [item for item in kept["items"] if item["id"] != item_id]}

    return _shown(await _change(request, conversation_id, without))


async def _find(request: Request, conversation_id: str) -> Data:
    """Raises RequestNotFound."""
    store = store_of(request, conversation_id)
    kept = await asyncio.to_thread(store.get, owner_of(request), conversation_id)
    return _known(kept, conversation_id)


async def _change(request: Request, conversation_id: str, change: Callable[[Data], Data]) -> Data:
    """Raises RequestNotFound."""
    await _find(request, conversation_id)
    store = store_of(request, conversation_id)
    kept = await asyncio.to_thread(store.update, owner_of(request), conversation_id, change)
    return _known(kept, conversation_id)


def _known(kept: Data | None, conversation_id: str) -> Data:
    if kept is None or "items" not in kept:
        raise RequestNotFound(f"No conversation `{conversation_id}` is stored here", param="conversation_id")
    return kept


def _shown(kept: Data) -> dict[str, Any]:
    shown = {name: kept[name] for name in ("id", "created_at", "metadata")}
    return {**shown, "object": "conversation"}
