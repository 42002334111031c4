"""POST /api/show; GET /api/tags, /api/ps and /api/version."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from quire.engine import VERSION
from quire.server.access.admission import ModelRoute
from quire.server.protocol.ollama import OllamaShowRequest
from quire.server.resolve.translated.ollama import plain_name
from quire.server.routes.bodies import Documented, parsed
from quire.server.runtime import Runtime, runtime_of
from quire.server.served_model import ServedModel, model_of

router = APIRouter(route_class=ModelRoute)


@router.get("/api/version")
async def version() -> dict[str, str]:
    return {"version": VERSION}


@router.get("/api/tags")
async def tags(request: Request) -> dict[str, Any]:
    """The names that requests may use."""
    return {"models": tagged(runtime_of(request))}


@router.get("/api/ps")
async def running(request: Request) -> dict[str, Any]:
    """The same: all are loaded."""
    return {"models": held(runtime_of(request))}


@router.post("/api/show", response_model=None, openapi_extra=Documented(OllamaShowRequest))
async def show(request: Request) -> dict[str, Any]:
    """What is known of a model. Raises ModelNotFound."""
    asked = await parsed(request, OllamaShowRequest)
    model, info = model_of(request), runtime_of(request).info
    model.answer_name(plain_name(asked.model or asked.name, model))
    able = ["completion"] if "generate" in model.tasks else []
    able += ["tools"] if model.formats.tools is not None else []
    able += ["thinking"] if model.formats.reasoning is not None else []
    able += ["vision"] if model.images is not None else []
    able += ["embedding"] if "embed" in model.tasks else []
    about = {"general.architecture": "quire", "quire.context_length": model.context_length}
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in model.sampling_defaults.items()),
        "template": model.formats.template,
        "details": _details(info.quantization or info.dtype),
        "model_info": about | {"general.basename": model.names[0]},
        "capabilities": able,
        "modified_at": _since(model),
    }


def tagged(runtime: Runtime) -> list[dict[str, Any]]:
    """The entry in /api/tags for each name of a model."""
    model, info = runtime.model, runtime.info
    about = {"digest": model.fingerprint, "modified_at": _since(model), "size": info.weight_bytes}
    return [named(name, info.quantization or info.dtype) | about for name in (*model.names, *model.adapters)]


def held(runtime: Runtime) -> list[dict[str, Any]]:
    """The entry in /api/ps for each name of a model."""
    never = {"expires_at": "9999-12-31T23:59:59Z", "context_length": runtime.model.context_length}
    size = runtime.info.weight_bytes + runtime.info.kv_bytes + runtime.info.state_bytes
    return [{**each, **never, "size_vram": size} for each in tagged(runtime)]


def named(name: str, few_bits: str = "") -> dict[str, Any]:
    """What is known of a model even if it is not loaded. Ollama's own client shows the first twelve characters of the
    digest, whatever it is."""
    return {"name": name, "model": name, "digest": "fp_not_loaded", "size": 0, "details": _details(few_bits)}


def _details(few_bits: str) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": few_bits,
    }


def _since(model: ServedModel) -> str:
    return datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
