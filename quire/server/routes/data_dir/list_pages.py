from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.common.errors import InvalidRequest, QuireError
from quire.server.access.authentication import owner_of
from quire.server.access.memory_lease import grow_request_lease
from quire.server.encoding import encode_json
from quire.server.store.response_store import ItemPage, Store

Result = TypeVar("Result")
Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]


def unknown_cursor_error(kind: str, after: str | None) -> InvalidRequest:
    return InvalidRequest(f"after: there is no {kind} `{after}`", param="after")


async def list_items_response(
    request: Request, store: Store, id: str, limit: int, order: Order, after: str | None
) -> Response:
    """Raises InvalidRequest for an unknown `after`, and Overloaded if too many unsent answers occupy memory."""
    method = partial(store.read_item_page, newest_first=order == "desc", after=after)
    page = await find_or_raise(request, method, id, limit, not_found=unknown_cursor_error("item", after))
    return leased_json_response(request, encode_item_page(page))


async def find_or_raise(
    request: Request, method: Callable[..., Result | None], *args: object, not_found: QuireError
) -> Result:
    """Calls `method` in a thread with the request's owner and `args`. Raises `not_found` if the result is falsy."""
    result = await asyncio.to_thread(method, owner_of(request), *args)
    if not result:
        raise not_found
    return result


def encode_item_page(page: ItemPage) -> bytes:
    ids: list[str | None] = [*(item.id for item in page.items)] or [None]
    about = {"first_id": ids[0], "last_id": ids[-1], "has_more": page.more}
    return b'{"object":"list","data":[%b],%b' % (b",".join(item.data for item in page.items), encode_json(about)[1:])


def list_page_response(objects: Sequence[Mapping[str, Any]], *, has_more: bool) -> Response:
    ids = [each["id"] for each in objects] or [None]
    about = {"object": "list", "first_id": ids[0], "last_id": ids[-1], "has_more": has_more, "data": objects}
    return Response(encode_json(about), media_type="application/json")


def leased_json_response(request: Request, body: bytes) -> Response:
    """Raises Overloaded if too many unsent answers occupy memory."""
    grow_request_lease(request.scope, len(body))
    return Response(body, media_type="application/json")
