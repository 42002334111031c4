"""/v1/conversations: OpenAI's Conversations API. A response that names a conversation adds its items to it."""

from __future__ import annotations

import asyncio
import secrets
import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.errors import RequestNotFound
from quire.server.access.admission import CountedRoute
from quire.server.encoding import encode_json
from quire.server.protocol.stored.conversations import ConversationRequest, ItemsRequest, MetadataRequest
from quire.server.resolve.translated.conversations import new_conversation, new_items, new_metadata
from quire.server.resolve.translated.history import CONVERSATION
from quire.server.routes.bodies import documented, owner_of, worked_on
from quire.server.routes.responses import store_of
from quire.server.routes.stored.pages import Limit, Order, answer, listed, page_body
from quire.server.store.store import Page, Put, Stored

router = APIRouter(route_class=CountedRoute)
ONE = "/v1/conversations/{conversation_id}"


@router.post("/v1/conversations", response_model=None, openapi_extra=documented(ConversationRequest))
async def create_conversation(request: Request) -> Response:
    store = store_of(request, "conversation")
    given = await worked_on(request, new_conversation)
    id = f"conv_{secrets.token_hex(16)}"
    told = {"id": id, "created_at": int(time.time()), "metadata": given.metadata, "object": "conversation"}
    kept = Stored("conversation", {}, encode_json(told))
    await asyncio.to_thread(store.put, owner_of(request), Put(id, kept, given.items))
    return answer(request, kept.data)


@router.get(ONE, response_model=None)
async def retrieve_conversation(conversation_id: str, request: Request) -> Response:
    return answer(request, (await _find(request, conversation_id)).data)


@router.post(ONE, response_model=None, openapi_extra=documented(MetadataRequest))
async def update_conversation(conversation_id: str, request: Request) -> Response:
    """Replace the metadata."""
    store = store_of(request, conversation_id)
    metadata = await worked_on(request, new_metadata)
    told = await asyncio.to_thread(store.describe, owner_of(request), conversation_id, metadata)
    if told is None:
        raise _unknown(conversation_id)
    return answer(request, told)


@router.delete(ONE)
async def delete_conversation(conversation_id: str, request: Request) -> dict[str, object]:
    """Forget a conversation with its items; its responses stay."""
    store = store_of(request, conversation_id)
    await _find(request, conversation_id)
    await asyncio.to_thread(store.delete, owner_of(request), conversation_id)
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


@router.get(f"{ONE}/items", response_model=None)
async def list_items(
    conversation_id: str, request: Request, limit: Limit = 20, order: Order = "desc", after: str | None = None
) -> Response:
    await _find(request, conversation_id)
    store = store_of(request, conversation_id)
    return await listed(request, store, owner_of(request), conversation_id, limit, order, after)


@router.post(f"{ONE}/items", response_model=None, openapi_extra=documented(ItemsRequest))
async def add_items(conversation_id: str, request: Request) -> Response:
    store = store_of(request, conversation_id)
    added = await worked_on(request, new_items)
    if not await asyncio.to_thread(store.append, owner_of(request), conversation_id, added, CONVERSATION):
        raise _unknown(conversation_id)
    return answer(request, page_body(Page(added, more=False)))


@router.get(f"{ONE}/items/{{item_id}}", response_model=None)
async def retrieve_item(conversation_id: str, item_id: str, request: Request) -> Response:
    await _find(request, conversation_id)
    store = store_of(request, conversation_id)
    found = await asyncio.to_thread(store.item, owner_of(request), conversation_id, item_id)
    if found is None:
        raise _no_item(item_id)
    return answer(request, found)


@router.delete(f"{ONE}/items/{{item_id}}", response_model=None)
async def delete_item(conversation_id: str, item_id: str, request: Request) -> Response:
    kept = await _find(request, conversation_id)
    store = store_of(request, conversation_id)
    if not await asyncio.to_thread(store.delete_item, owner_of(request), conversation_id, item_id):
        raise _no_item(item_id)
    return answer(request, kept.data)


def _no_item(item_id: str) -> RequestNotFound:
    return RequestNotFound(f"The conversation has no item `{item_id}`", param="item_id")


def _unknown(conversation_id: str) -> RequestNotFound:
    return RequestNotFound(f"No conversation `{conversation_id}` is stored here", param="conversation_id")


async def _find(request: Request, conversation_id: str) -> Stored:
    """Raises RequestNotFound."""
    store = store_of(request, conversation_id)
    found = await asyncio.to_thread(store.get, owner_of(request), "conversation", conversation_id)
    if found is None:
        raise _unknown(conversation_id)
    return found
