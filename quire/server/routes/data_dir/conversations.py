"""Conversations. A response that names a conversation appends its own items to the conversation."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.common import clock, random_source
from quire.engine.common.errors import RequestNotFound
from quire.server.access.admission import StoredDataRoute
from quire.server.encoding import encode_json
from quire.server.pipeline.resolve import resolve_body
from quire.server.protocol.stored_objects import ConversationRequest, ItemsRequest, MetadataRequest
from quire.server.resolve.other_apis.history import CONVERSATION_BOUNDS
from quire.server.resolve.other_apis.stored_bodies import parse_metadata, parse_new_conversation, parse_new_items
from quire.server.routes.api_description import BodySchema
from quire.server.routes.data_dir.list_pages import (
    Limit,
    Order,
    encode_item_page,
    find_or_raise,
    leased_json_response,
    list_items_response,
)
from quire.server.routes.responses import require_store, write_in_owner_thread
from quire.server.store.response_store import ItemPage, ObjectToStore, ObjectWithoutItems

router = APIRouter(route_class=StoredDataRoute)
CONVERSATION_PATH = "/v1/conversations/{conversation_id}"


@router.post("/v1/conversations", response_model=None, openapi_extra=BodySchema(ConversationRequest))
async def create_conversation(request: Request) -> Response:
    store = require_store(request, "conversation")
    body = await resolve_body(request, parse_new_conversation)
    id = f"conv_{random_source.token_hex(16)}"
    fields = {"id": id, "created_at": int(clock.time()), "metadata": body.metadata, "object": "conversation"}
    stored = ObjectWithoutItems("conversation", {}, encode_json(fields))
    await write_in_owner_thread(request, store.put, ObjectToStore(id, stored, body.items))
    return leased_json_response(request, stored.data)


@router.get(CONVERSATION_PATH, response_model=None)
async def retrieve_conversation(conversation_id: str, request: Request) -> Response:
    return leased_json_response(request, (await _find_conversation(request, conversation_id)).data)


@router.post(CONVERSATION_PATH, response_model=None, openapi_extra=BodySchema(MetadataRequest))
async def update_conversation(conversation_id: str, request: Request) -> Response:
    """Replace the metadata."""
    store = require_store(request, conversation_id)
    metadata, not_found = await resolve_body(request, parse_metadata), _conversation_not_found(conversation_id)
    return leased_json_response(
        request, await find_or_raise(request, store.replace_metadata, conversation_id, metadata, not_found=not_found)
    )


@router.delete(CONVERSATION_PATH)
async def delete_conversation(conversation_id: str, request: Request) -> dict[str, object]:
    """Delete a conversation with its items. Its responses stay."""
    await _find_conversation(request, conversation_id)
    await write_in_owner_thread(request, require_store(request, conversation_id).delete, conversation_id)
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


@router.get(f"{CONVERSATION_PATH}/items", response_model=None)
async def list_items(
    conversation_id: str, request: Request, limit: Limit = 20, order: Order = "desc", after: str | None = None
) -> Response:
    await _find_conversation(request, conversation_id)
    return await list_items_response(
        request, require_store(request, conversation_id), conversation_id, limit, order, after
    )


@router.post(f"{CONVERSATION_PATH}/items", response_model=None, openapi_extra=BodySchema(ItemsRequest))
async def add_items(conversation_id: str, request: Request) -> Response:
    store = require_store(request, conversation_id)
    added = await resolve_body(request, parse_new_items)
    if not await write_in_owner_thread(request, store.append_items, conversation_id, added, CONVERSATION_BOUNDS):
        raise _conversation_not_found(conversation_id)
    return leased_json_response(request, encode_item_page(ItemPage(added, more=False)))


@router.get(f"{CONVERSATION_PATH}/items/{{item_id}}", response_model=None)
async def retrieve_item(conversation_id: str, item_id: str, request: Request) -> Response:
    await _find_conversation(request, conversation_id)
    store = require_store(request, conversation_id)
    return leased_json_response(
        request,
        await find_or_raise(request, store.get_item, conversation_id, item_id, not_found=_item_not_found(item_id)),
    )


@router.delete(f"{CONVERSATION_PATH}/items/{{item_id}}", response_model=None)
async def delete_item(conversation_id: str, item_id: str, request: Request) -> Response:
    conversation = await _find_conversation(request, conversation_id)
    store = require_store(request, conversation_id)
    await find_or_raise(request, store.delete_item, conversation_id, item_id, not_found=_item_not_found(item_id))
    return leased_json_response(request, conversation.data)


def _item_not_found(item_id: str) -> RequestNotFound:
    return RequestNotFound(f"The conversation has no item `{item_id}`", param="item_id")


def _conversation_not_found(conversation_id: str) -> RequestNotFound:
    return RequestNotFound(f"No conversation `{conversation_id}` is stored here", param="conversation_id")


async def _find_conversation(request: Request, conversation_id: str) -> ObjectWithoutItems:
    store = require_store(request, conversation_id)
    return await find_or_raise(
        request,
        store.get_without_items,
        "conversation",
        conversation_id,
        not_found=_conversation_not_found(conversation_id),
    )
