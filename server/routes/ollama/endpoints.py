"""POST /api/chat, /api/generate, /api/embed, /api/embeddings and /api/show; GET /api/tags, /api/ps and /api/version."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine import VERSION
from quire.server.access.admission import GenerationRoute
from quire.server.config import ServerConfig
from quire.server.generation.answers.ollama import OllamaWriter, Shape
from quire.server.protocol.ollama import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from quire.server.resolve.common import Resolved
from quire.server.resolve.parse import parse
from quire.server.resolve.tokenize import Reply
from quire.server.resolve.translated.ollama import (
    plain_name,
    resolve_chat,
    resolve_embed,
    resolve_embeddings,
    resolve_generate,
)
from quire.server.routes.bodies import Work, checked, documented, worked_on
from quire.server.routes.reply import reply
from quire.server.routes.vectors.reply import answered
from quire.server.runtime import Runtime, runtime_of
from quire.server.served_model import ServedModel, model_of

router = APIRouter(route_class=GenerationRoute)
asking = APIRouter()


@router.post("/api/chat", response_model=None, openapi_extra=documented(OllamaChatRequest))
async def chat(request: Request) -> Response:
    """Answer a conversation."""
    return await _answered(request, resolve_chat, "message")


@router.post("/api/generate", response_model=None, openapi_extra=documented(OllamaGenerateRequest))
async def generate(request: Request) -> Response:
    """Answer a prompt, or continue one that is raw."""
    return await _answered(request, resolve_generate, "response")


async def _answered(request: Request, resolve: Work[Resolved | Reply], shape: Shape) -> Response:
    made = await worked_on(request, resolve)
    if isinstance(made, Reply):
        return Response(made.body, 200, made.headers, "application/json")
    spec = await checked(request, made)
    return await reply(request, spec, OllamaWriter(spec, shape))


@router.post("/api/embed", response_model=None, openapi_extra=documented(OllamaEmbedRequest))
async def embed(request: Request) -> Response:
    """A vector of each input, of length 1."""
    return await answered(request, resolve_embed)


@router.post("/api/embeddings", response_model=None, openapi_extra=documented(OllamaEmbeddingsRequest))
async def embeddings(request: Request) -> Response:
    """A vector of one prompt."""
    return await answered(request, resolve_embeddings)


@asking.get("/api/version")
async def version() -> dict[str, str]:
    return {"version": VERSION}


@asking.get("/api/tags")
async def tags(request: Request) -> dict[str, Any]:
    """The names that requests may use."""
    return {"models": tagged(runtime_of(request))}


@asking.get("/api/ps")
async def running(request: Request) -> dict[str, Any]:
    """The same: all are loaded."""
    return {"models": held(runtime_of(request))}


@asking.post("/api/show", response_model=None, openapi_extra=documented(OllamaShowRequest))
async def show(request: Request) -> dict[str, Any]:
    """What is known of a model. Raises ModelNotFound."""
    asked = await worked_on(request, _shown_body)
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


def _shown_body(given: bytes, model: ServedModel, config: ServerConfig) -> OllamaShowRequest:
    return parse(given, OllamaShowRequest)


def tagged(runtime: Runtime) -> list[dict[str, Any]]:
    """What /api/tags has for each name of a model."""
    model, info = runtime.model, runtime.info
    about = {"digest": model.fingerprint, "modified_at": _since(model), "size": info.weight_bytes}
    return [named(name, info.quantization or info.dtype) | about for name in (*model.names, *model.adapters)]


def held(runtime: Runtime) -> list[dict[str, Any]]:
    """What /api/ps has for each name of a model."""
    never = {"expires_at": "9999-12-31T23:59:59Z", "context_length": runtime.model.context_length}
    size = runtime.info.weight_bytes + runtime.info.kv_bytes + runtime.info.state_bytes
    return [{**each, **never, "size_vram": size} for each in tagged(runtime)]


def named(name: str, few_bits: str = "") -> dict[str, Any]:
    """What is known of a model that need not be loaded. Ollama's own client shows twelve characters of any digest."""
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


router.include_router(asking)
