"""Lists that come in pages, as OpenAI's do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.errors import InvalidRequest
from quire.server.access.held import hold
from quire.server.encoding import encode_json
from quire.server.store.store import Page, Store

Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]


async def listed(
    request: Request, store: Store, owner: str, id: str, limit: int, order: Order, after: str | None
) -> Response:
    """The next `limit` items of a stored object behind the one with the id `after`. Raises InvalidRequest, and
    Overloaded where too much waits to be sent."""
    page = await asyncio.to_thread(store.page, owner, id, limit, newest_first=order == "desc", after=after)
    if page is None:
        raise InvalidRequest(f"after: there is no item `{after}`", param="after")
    return answer(request, page_body(page))


def page_body(page: Page) -> bytes:
    ids: list[str | None] = [*(item.id for item in page.items)] or [None]
    about = {"first_id": ids[0], "last_id": ids[-1], "has_more": page.more}
    return b'{"object":"list","data":[%b],%b' % (b",".join(item.data for item in page.items), encode_json(about)[1:])


def page_of(objects: Sequence[Mapping[str, Any]], *, more: bool) -> Response:
    """A page of objects that have ids."""
    ids = [each["id"] for each in objects] or [None]
    about = {"object": "list", "first_id": ids[0], "last_id": ids[-1], "has_more": more, "data": objects}
    return Response(encode_json(about), media_type="application/json")


def answer(request: Request, body: bytes) -> Response:
    """What is stored, as JSON. Raises Overloaded where too much waits to be sent."""
    hold(request.scope, len(body))
    return Response(body, media_type="application/json")
