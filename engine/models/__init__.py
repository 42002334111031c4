"""The model families, by config.json's model_type: one thin file and one line here each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.models import gemma, gemma2, gemma3, llama, mistral, qwen2, qwen3, smollm3

if TYPE_CHECKING:
    from quire.engine.models.decoder import DecoderSpec

FAMILIES: dict[str, Callable[[ModelConfig], DecoderSpec]] = {
    "gemma": gemma.spec,
    "gemma2": gemma2.spec,
    "gemma3_text": gemma3.spec,
    "llama": llama.spec,
    "mistral": mistral.spec,
    "qwen2": qwen2.spec,
    "qwen3": qwen3.spec,
    "smollm3": smollm3.spec,
}
_GATES = {False: ("silu",), True: ("gelu_pytorch_tanh", "gelu")}
"""Of a spec with or without `gelu`: what its config.json may call the gate. Old Gemma files write gelu, mean tanh."""


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    """The spec of a model, by its family. Raises ModelError for a family that is not here."""
    if config.model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(f"model: model_type {config.model_type!r} is not supported; supported: {known}")
    spec = FAMILIES[config.model_type](config)
    activation = config.raw.get("hidden_activation") or config.raw.get("hidden_act")
    if activation is not None and activation not in _GATES[spec.gelu]:
        raise ModelError(f"model: hidden_act {activation!r} is not supported")
    return spec
