from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from quire.engine import VERSION
from quire.engine.common.types import EngineInfo
from quire.server.access.admission import ModelRoute
from quire.server.formats.chat_formats import list_capabilities
from quire.server.pipeline.resolve import parse_request_body
from quire.server.protocol.ollama import OllamaShowRequest
from quire.server.resolve.other_apis.ollama import model_name_without_latest_tag
from quire.server.routes.api_description import BodySchema
from quire.server.runtime.model_runtime import ModelRuntime
from quire.server.runtime.server_context import get_runtime
from quire.server.served_model import ServedModel, get_model

router = APIRouter(route_class=ModelRoute)


@router.get("/api/version")
async def version() -> dict[str, str]:
    return {"version": VERSION}


@router.get("/api/tags")
async def tags(request: Request) -> dict[str, Any]:
    """The names that requests may use."""
    return {"models": tags_entries(get_runtime(request))}


@router.get("/api/ps")
async def running(request: Request) -> dict[str, Any]:
    """Lists the same models as /api/tags, because all are loaded."""
    return {"models": ps_entries(get_runtime(request))}


@router.post("/api/show", response_model=None, openapi_extra=BodySchema(OllamaShowRequest))
async def show(request: Request) -> dict[str, Any]:
    """Facts about a model. Raises ModelNotFound."""
    body = await parse_request_body(request, OllamaShowRequest)
    model, info = get_model(request), get_runtime(request).info
    model.resolve_model_name(model_name_without_latest_tag(body.model or body.name, model))
    accepts_images = model.multimodal_prompt_builder is not None
    about = {
        "general.architecture": model.model_type,
        f"{model.model_type}.context_length": model.context_length,
    }
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in model.sampling_defaults.items()),
        "template": model.chat_formats.template_text,
        "details": _details_of_served_model(model, info),
        "model_info": about | {"general.basename": model.names[0]},
        "capabilities": list_capabilities(model.tasks, model.chat_formats, accepts_images=accepts_images),
        "modified_at": _modified_at(model),
    }


def tags_entries(runtime: ModelRuntime) -> list[dict[str, Any]]:
    model, info = runtime.model, runtime.info
    about: dict[str, Any] = {"digest": model.fingerprint, "modified_at": _modified_at(model), "size": info.weight_bytes}
    about["details"] = _details_of_served_model(model, info)
    return [model_entry(name) | about for name in (*model.names, *model.adapters)]


def ps_entries(runtime: ModelRuntime) -> list[dict[str, Any]]:
    static_fields = {"expires_at": "9999-12-31T23:59:59Z", "context_length": runtime.model.context_length}
    size = runtime.info.weight_bytes + runtime.info.kv_bytes + runtime.info.state_bytes
    return [{**each, **static_fields, "size_vram": size} for each in tags_entries(runtime)]


def model_entry(name: str) -> dict[str, Any]:
    """Describes a model that is not loaded. Ollama's client shows the digest's first twelve characters."""
    return {"name": name, "model": name, "digest": "fp_not_loaded", "size": 0, "details": _model_details()}


def _details_of_served_model(model: ServedModel, info: EngineInfo) -> dict[str, Any]:
    return _model_details(model.model_type, model.weights_format, info.quantization or info.dtype)


def _model_details(family: str = "", weights_format: str = "", quantization: str = "") -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": weights_format,
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": quantization,
    }


def _modified_at(model: ServedModel) -> str:
    return datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
