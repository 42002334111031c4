"""GET /v1/models: what is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from quire.server.served_model import Serving, serving_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    serving = serving_of(request)
    return {"object": "list", "data": [_card(name, serving) for name in serving.config.model_names]}


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, request: Request) -> dict[str, Any]:
    """One model; ids may contain slashes."""
    serving = serving_of(request)
    return _card(serving.model_name(model), serving)


def _card(name: str, serving: Serving) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "quire",
        "root": serving.config.model_names[0],
        "parent": None,
        "max_model_len": serving.info.max_model_len,
    }
