from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire.engine import VERSION
from quire.engine.common.errors import InvalidRequest, Overloaded
from quire.engine.text.tokenizer import ADDED_TOKEN_FIELDS
from quire.server.access.admission import ModelRoute, RateLimitedRoute
from quire.server.adapter_registry import AdapterRegistry
from quire.server.encoding import encode_ascii_json, encode_json
from quire.server.error_responses import SLOTS_PATH
from quire.server.pipeline.resolve import parse_request_body
from quire.server.protocol.operator_requests import LoadAdapterRequest, UnloadAdapterRequest
from quire.server.routes.api_description import BodySchema
from quire.server.runtime.server_context import get_runtime
from quire.server.served_model import NEUTRAL_SAMPLING, TASK_OUTPUTS, ServedModel, get_model

router = APIRouter(route_class=ModelRoute)
rate_limited_router = APIRouter(route_class=RateLimitedRoute)
MAX_SAFE_INTEGER = 2**53
"""Larger integers are not exact in all JSON readers. Tokenizers without a limit write 10**30."""


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    return model_list_body(list_model_cards(get_model(request)))


def model_list_body(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "object": "list",
        "data": entries,
        "has_more": False,
        "first_id": entries[0]["id"],
        "last_id": entries[-1]["id"],
        "models": [  # TypeSafe's clients read it; a model that was never loaded has no date
            {"name": each["id"], "description": "", "release_date": each.get("created_at", "")[:10]} for each in entries
        ],
    }


def list_model_cards(model: ServedModel) -> list[dict[str, Any]]:
    return [_build_model_card(name, model) for name in (*model.names, *model.adapters)]


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, request: Request) -> dict[str, Any]:
    """One model; ids may contain slashes."""
    served = get_model(request)
    return _build_model_card(served.resolve_model_name(model), served)


def _build_model_card(name: str, model: ServedModel) -> dict[str, Any]:
    """Has fields of OpenAI's, Anthropic's and OpenRouter's APIs, and all names of the context length."""
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
        "architecture": {
            "input_modalities": _input_modalities(model),
            "output_modalities": [TASK_OUTPUTS[each] for each in model.tasks],
        },
        "default_parameters": model.default_sampling,
    }


def _input_modalities(model: ServedModel) -> list[str]:
    return ["text"] if model.multimodal_prompt_builder is None else ["text", "image"]


@router.post("/v1/load_lora_adapter", response_model=None, openapi_extra=BodySchema(LoadAdapterRequest))
async def load_lora_adapter(request: Request) -> PlainTextResponse:
    """Serve an adapter as a model, from the next request on. Needs an admin's API key if there are keys. The adapter is
    copied and checked before the answer, while streams continue.
    """
    adapters, body = _require_adapter_registry(request), await parse_request_body(request, LoadAdapterRequest)
    await adapters.load_lora_adapter(body.lora_name, body.lora_path, replace=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_model=None, openapi_extra=BodySchema(UnloadAdapterRequest))
async def unload_lora_adapter(request: Request) -> PlainTextResponse:
    """Stop serving an adapter; its running requests finish. Needs an admin's API key if there are keys."""
    adapters, body = _require_adapter_registry(request), await parse_request_body(request, UnloadAdapterRequest)
    await adapters.unload_lora_adapter(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _require_adapter_registry(request: Request) -> AdapterRegistry:
    adapters = get_runtime(request).adapter_registry
    if adapters is None:
        raise InvalidRequest("This server was started without --enable-lora")
    return adapters


@rate_limited_router.get("/props", response_model=None)
async def props(request: Request) -> dict[str, Any]:
    """What llama.cpp's clients read: context length, chat template, sampling defaults and more."""
    model, runtime = get_model(request), get_runtime(request)
    special = model.tokenizer.special_tokens
    usual = {**NEUTRAL_SAMPLING, **model.sampling_defaults}
    usual["repeat_penalty"] = usual.pop("repetition_penalty")
    return {
        "default_generation_settings": {"n_ctx": model.context_length, "params": {**usual, "n_predict": -1}},
        "total_slots": runtime.config.max_running_requests,
        "model_alias": model.names[0],
        "model_path": model.names[0],
        "chat_template": model.tokenizer.chat_templates.get("default") or "",
        "bos_token": special.get("bos_token") or "",
        "eos_token": special.get("eos_token") or "",
        "modalities": {"vision": model.multimodal_prompt_builder is not None, "audio": False},
        "build_info": f"quire {VERSION}",
        "is_sleeping": runtime.client.engine_core.asleep,
    }


@rate_limited_router.get(SLOTS_PATH, response_model=None)
async def list_slots(request: Request, fail_on_no_slot: bool = False) -> Response:
    """The load in llama.cpp's form: --max-num-seqs slots, and which of them are busy. Contains nothing about requests.
    With fail_on_no_slot=1, 503 if no slot is free.
    """
    model, runtime = get_model(request), get_runtime(request)
    total, stats = runtime.config.max_running_requests, runtime.client.engine_core.stats
    num_busy = min(total, stats.running)
    if fail_on_no_slot and num_busy == total:
        raise Overloaded("no slot is free")
    speculative = runtime.config.speculative_config is not None
    slots = [
        {"id": i, "n_ctx": model.context_length, "speculative": speculative, "is_processing": i < num_busy}
        for i in range(total)
    ]
    return Response(encode_json(slots), media_type="application/json")


@rate_limited_router.get("/tokenizer_info", response_model=None)
def tokenizer_info(request: Request) -> Response:
    """The effective tokenizer_config.json in vLLM's form, as lm-eval's remote tokenizer reads it."""
    return Response(encode_ascii_json(tokenizer_config(get_model(request))), 200, media_type="application/json")


def tokenizer_config(model: ServedModel) -> dict[str, Any]:
    """Omits paths of the machine that wrote the file. Special tokens are strings or null. Includes added_tokens_decoder
    and chat_template, whichever file has them.
    """
    tokenizer = model.tokenizer
    entries = {name: value for name, value in tokenizer.config.items() if not name.endswith(("_path", "_file"))}
    max_length = entries.get("model_max_length")
    has_max_length = isinstance(max_length, int) and 0 < max_length <= MAX_SAFE_INTEGER
    eos = tokenizer.id_to_token(tokenizer.eos_token_ids[0]) if tokenizer.eos_token_ids else None
    added_tokens = tokenizer.backend.get_added_tokens_decoder()
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **entries,
        "model_max_length": max_length if has_max_length else model.context_length,
        "bos_token": None,
        "eos_token": eos,
        "pad_token": None,
        **tokenizer.special_tokens,
        "chat_template": tokenizer.chat_templates.get("default"),
        "added_tokens_decoder": {
            str(token_id): {name: getattr(token, name) for name in ADDED_TOKEN_FIELDS}
            for token_id, token in sorted(added_tokens.items())
        },
    }
