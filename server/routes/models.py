"""GET /v1/models: the names that requests may use, the model's own and those of its adapters; POST
/v1/load_lora_adapter and /v1/unload_lora_adapter, with vLLM's bodies and answers: adapters come and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from quire.engine.errors import InvalidRequest
from quire.server.access.admission import ModelRoute
from quire.server.adapters import Adapters
from quire.server.protocol.adapters import LoadAdapterRequest, UnloadAdapterRequest
from quire.server.routes.bodies import Documented, parsed
from quire.server.runtime import runtime_of
from quire.server.served_model import MADE, ServedModel, model_of

router = APIRouter(route_class=ModelRoute)


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    return listed(cards(model_of(request)))


def listed(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The answer with these cards, at least one."""
    return {
        "object": "list",
        "data": found,
        "has_more": False,
        "first_id": found[0]["id"],
        "last_id": found[-1]["id"],
        "models": [  # as TypeSafe's clients read it; of one that was never loaded no date is known
            {"name": each["id"], "description": "", "release_date": each.get("created_at", "")[:10]} for each in found
        ],
    }


def cards(model: ServedModel) -> list[dict[str, Any]]:
    """One for each name of a model."""
    return [_card(name, model) for name in (*model.names, *model.adapters)]


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, request: Request) -> dict[str, Any]:
    """One model; ids may contain slashes."""
    served = model_of(request)
    return _card(served.answer_name(model), served)


def _card(name: str, model: ServedModel) -> dict[str, Any]:
    """What clients of OpenAI's API read, of Anthropic's, the context's length under each name in use, and what
    OpenRouter's says of what a model reads and samples with."""
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "quire",
        "root": model.names[0],
        "parent": None if name in model.names else model.names[0],
        "max_model_len": model.context_length,
        "context_length": model.context_length,
        "meta": {"n_ctx": model.context_length},
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model.context_length,
        "architecture": {"input_modalities": _read(model), "output_modalities": [MADE[each] for each in model.tasks]},
        "default_parameters": model.defaults,
    }


def _read(model: ServedModel) -> list[str]:
    return ["text"] if model.images is None else ["text", "image"]


@router.post("/v1/load_lora_adapter", response_model=None, openapi_extra=Documented(LoadAdapterRequest))
async def load_lora_adapter(request: Request) -> PlainTextResponse:
    """Serve an adapter as a model of its own, from the next request on. Needs an admin's API key where there are keys.

    It is copied and checked before the answer, while streams go on.
    """
    adapters, body = _adapters(request), await parsed(request, LoadAdapterRequest)
    await adapters.load(body.lora_name, body.lora_path, replace=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_model=None, openapi_extra=Documented(UnloadAdapterRequest))
async def unload_lora_adapter(request: Request) -> PlainTextResponse:
    """Serve an adapter no more; its requests under way finish. Needs an admin's API key where there are keys."""
    adapters, body = _adapters(request), await parsed(request, UnloadAdapterRequest)
    await adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _adapters(request: Request) -> Adapters:
    adapters = runtime_of(request).adapters
    if adapters is None:
        raise InvalidRequest("This server was started without --enable-lora")
    return adapters
