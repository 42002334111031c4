"""GET /props, as llama.cpp's server has it; /tokenize, /detokenize and /apply-template know its words too."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from quire.engine import VERSION
from quire.server.access.admission import CountedRoute
from quire.server.runtime import runtime_of
from quire.server.served_model import model_of

router = APIRouter(route_class=CountedRoute)
USUAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""What requests get where neither they nor the model's generation_config.json say otherwise."""


@router.get("/props", response_model=None)
async def props(request: Request) -> dict[str, Any]:
    """What is known of the model: clients of llama.cpp's read the context's length and the chat template here."""
    model, runtime = model_of(request), runtime_of(request)
    special = model.tokenizer.special_tokens
    usual = {**USUAL, **model.sampling_defaults}
    usual["repeat_penalty"] = usual.pop("repetition_penalty")
    return {
        "default_generation_settings": {"n_ctx": model.context_length, "params": {**usual, "n_predict": -1}},
        "total_slots": runtime.config.most_running,
        "model_alias": model.names[0],
        "model_path": model.names[0],
        "chat_template": model.tokenizer.chat_templates.get("default") or "",
        "bos_token": special.get("bos_token") or "",
        "eos_token": special.get("eos_token") or "",
        "modalities": {"vision": model.images is not None, "audio": False},
        "build_info": f"quire {VERSION}",
        "is_sleeping": runtime.client.link.asleep,
    }
