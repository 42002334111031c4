"""/v1/conversations: OpenAI's Conversations API. A response that names a conversation appends its items to it."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine import clock, random_source
from quire.engine.errors import RequestNotFound
from quire.server.access.admission import StoredRoute
from quire.server.encoding import encode_json
from quire.server.protocol.kept import ConversationRequest, ItemsRequest, MetadataRequest
from quire.server.resolve.translated.history import CONVERSATION
from quire.server.resolve.translated.stored import new_conversation, new_items, new_metadata
from quire.server.routes.bodies import Documented, worked_on
from quire.server.routes.responses import long_write, store_of
from quire.server.routes.stored.pages import Limit, Order, answer, found, listed, page_body
from quire.server.store.store import Page, Put, Stored

router = APIRouter(route_class=StoredRoute)
ONE = "/v1/conversations/{conversation_id}"


@router.post("/v1/conversations", response_model=None, openapi_extra=Documented(ConversationRequest))
async def create_conversation(request: Request) -> Response:
    store = store_of(request, "conversation")
    given = await worked_on(request, new_conversation)
    id = f"conv_{random_source.token_hex(16)}"
    told = {"id": id, "created_at": int(clock.time()), "metadata": given.metadata, "object": "conversation"}
    kept = Stored("conversation", {}, encode_json(told))
    await long_write(request, store.put, Put(id, kept, given.items))
    return answer(request, kept.data)


@router.get(ONE, response_model=None)
async def retrieve_conversation(conversation_id: str, request: Request) -> Response:
    return answer(request, (await _find(request, conversation_id)).data)


@router.post(ONE, response_model=None, openapi_extra=Documented(MetadataRequest))
async def update_conversation(conversation_id: str, request: Request) -> Response:
    """Replace the metadata."""
    store = store_of(request, conversation_id)
    metadata, lacking = await worked_on(request, new_metadata), _unknown(conversation_id)
    return answer(request, await found(request, store.describe, conversation_id, metadata, lacking=lacking))


@router.delete(ONE)
async def delete_conversation(conversation_id: str, request: Request) -> dict[str, object]:
    """Delete a conversation with its items. Its responses stay."""
    await _find(request, conversation_id)
    await long_write(request, store_of(request, conversation_id).delete, conversation_id)
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


@router.get(f"{ONE}/items", response_model=None)
async def list_items(
    conversation_id: str, request: Request, limit: Limit = 20, order: Order = "desc", after: str | None = None
) -> Response:
    await _find(request, conversation_id)
    return await listed(request, store_of(request, conversation_id), conversation_id, limit, order, after)


@router.post(f"{ONE}/items", response_model=None, openapi_extra=Documented(ItemsRequest))
async def add_items(conversation_id: str, request: Request) -> Response:
    store = store_of(request, conversation_id)
    added = await worked_on(request, new_items)
    if not await long_write(request, store.append, conversation_id, added, CONVERSATION):
        raise _unknown(conversation_id)
    return answer(request, page_body(Page(added, more=False)))


@router.get(f"{ONE}/items/{{item_id}}", response_model=None)
async def retrieve_item(conversation_id: str, item_id: str, request: Request) -> Response:
    await _find(request, conversation_id)
    store = store_of(request, conversation_id)
    return answer(request, await found(request, store.item, conversation_id, item_id, lacking=_no_item(item_id)))


@router.delete(f"{ONE}/items/{{item_id}}", response_model=None)
async def delete_item(conversation_id: str, item_id: str, request: Request) -> Response:
    kept = await _find(request, conversation_id)
    store = store_of(request, conversation_id)
    await found(request, store.delete_item, conversation_id, item_id, lacking=_no_item(item_id))
    return answer(request, kept.data)


def _no_item(item_id: str) -> RequestNotFound:
    return RequestNotFound(f"The conversation has no item `{item_id}`", param="item_id")


def _unknown(conversation_id: str) -> RequestNotFound:
    return RequestNotFound(f"No conversation `{conversation_id}` is stored here", param="conversation_id")


async def _find(request: Request, conversation_id: str) -> Stored:
    """Raises RequestNotFound."""
    store = store_of(request, conversation_id)
    return await found(request, store.get, "conversation", conversation_id, lacking=_unknown(conversation_id))
