"""The model families, by config.json's model_type: one thin file and one line here each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.errors import ModelError
from engine.model_files import ModelConfig
from engine.models import llama, mistral, qwen2, qwen3, smollm3

if TYPE_CHECKING:
    from engine.models.decoder import DecoderSpec

FAMILIES: dict[str, Callable[[ModelConfig], DecoderSpec]] = {
    "llama": llama.spec,
    "mistral": mistral.spec,
    "qwen2": qwen2.spec,
    "qwen3": qwen3.spec,
    "smollm3": smollm3.spec,
}


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    """The spec of a model, by its family. Raises ModelError for a family that is not here."""
    if config.model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(f"model: model_type {config.model_type!r} is not supported; supported: {known}", param="model")
    if (activation := config.raw.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"model: hidden_act {activation!r} is not supported", param="model")
    return FAMILIES[config.model_type](config)
