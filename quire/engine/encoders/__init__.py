"""The families of encoders: one thin file each, listed in engine/checkpoint/families.py by config.json's model_type."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from quire.engine.families import find_encoder_family
from quire.engine.families.base.model_config import ModelConfig

if TYPE_CHECKING:
    from quire.engine.encoders.encoder import EncoderSpec


def encoder_spec(config: ModelConfig) -> EncoderSpec:
    """Raises ModelError for what the family does not compute."""
    family = find_encoder_family(config.model_type)
    assert family is not None, f"{config.model_type} is no encoder"
    spec: EncoderSpec = import_module(f"quire.engine.encoders.{family.module}").spec(config)
    return spec
