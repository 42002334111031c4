"""The model families: one thin file each, which engine/checkpoint/families.py lists by config.json's model_type."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from quire.engine.checkpoint.families import FAMILIES
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.mlp import MlpSpec

if TYPE_CHECKING:
    from quire.engine.models.decoder import DecoderSpec

_GATES = {False: ("silu",), True: ("gelu_pytorch_tanh", "gelu")}
"""By MlpSpec.gelu: what config.json may name the gate. Old Gemma files say gelu but mean its tanh form."""


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    """The spec of a model, by its family. Raises ModelError for a family that is not listed."""
    if config.model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(f"model: model_type {config.model_type!r} is not supported; supported: {known}")
    spec: DecoderSpec = import_module(f"quire.engine.models.{FAMILIES[config.model_type]}").spec(config)
    activation = config.raw.get("hidden_activation") or config.raw.get("hidden_act")
    if activation is not None and activation not in _GATES[any(each.gelu for each in spec.parts(MlpSpec))]:
        raise ModelError(f"model: hidden_act {activation!r} is not supported")
    return spec
