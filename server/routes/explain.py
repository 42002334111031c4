"""GET /v1/requests/{id}/explain: where a request's time went."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from engine.errors import RequestNotFound
from server.explain import explanation
from server.serving import serving_of

router = APIRouter()


@router.get("/v1/requests/{name:path}/explain")
async def explain(name: str, request: Request) -> dict[str, Any]:
    """Of an open request or one of the last: time per phase, prompt chunks, batches it was in, preemptions, replays.

    By the answer's id or by X-Request-Id. With API keys, only of requests made with the same key, or with an admin key.
    """
    serving = serving_of(request)
    trail = serving.ledger.find(name, request.scope)
    if trail is None:
        raise RequestNotFound(f"No request `{name}` is known here, or not any more", param="id")
    return explanation(trail, serving.client.history, lambda name: serving.ledger.may_name(name, request.scope))
