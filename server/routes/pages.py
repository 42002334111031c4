"""Lists that come in pages, as OpenAI's do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Query

from quire.engine.errors import InvalidRequest

Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]


def page_of(items: Sequence[Any], limit: int, order: Order, after: str | None) -> dict[str, Any]:
    """The next `limit` items behind the one with the id `after`; the first of `items` is the oldest.

    Raises InvalidRequest.
    """
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise InvalidRequest(f"after: there is no item `{after}`", param="after")
        start = ids.index(after) + 1
    page = ordered[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(ordered),
    }
