"""GET /v1/models: the names that requests may use."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from quire.server.served_model import ServedModel, model_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    model = model_of(request)
    return {"object": "list", "data": [_card(name, model) for name in model.names]}


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, request: Request) -> dict[str, Any]:
    """One model; ids may contain slashes."""
    served = model_of(request)
    return _card(served.answer_name(model), served)


def _card(name: str, model: ServedModel) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "quire",
        "root": model.names[0],
        "parent": None,
        "max_model_len": model.context_length,
    }
