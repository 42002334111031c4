"""Lists that are returned page by page, as OpenAI's are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.errors import InvalidRequest, QuireError
from quire.server.access.held import hold
from quire.server.encoding import encode_json
from quire.server.routes.bodies import owner_of
from quire.server.store.store import Page, Store

Found = TypeVar("Found")
Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]


def no_after(kind: str, after: str | None) -> InvalidRequest:
    return InvalidRequest(f"after: there is no {kind} `{after}`", param="after")


async def listed(request: Request, store: Store, id: str, limit: int, order: Order, after: str | None) -> Response:
    """The next `limit` items of a stored object behind the one with the id `after`. Raises InvalidRequest, and
    Overloaded where too much waits to be sent."""
    method = partial(store.page, newest_first=order == "desc", after=after)
    page = await found(request, method, id, limit, lacking=no_after("item", after))
    return answer(request, page_body(page))


async def found(request: Request, method: Callable[..., Found | None], *args: object, lacking: QuireError) -> Found:
    """What a method of what is kept gives, called in a thread with the request's owner. Raises `lacking` where it gives
    nothing."""
    given = await asyncio.to_thread(method, owner_of(request), *args)
    if not given:
        raise lacking
    return given


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
