"""The families of encoders: one thin file each, listed in engine/checkpoint/families.py by config.json's model_type."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from quire.engine.checkpoint.families import ENCODERS
from quire.engine.checkpoint.files import ModelConfig

if TYPE_CHECKING:
    from quire.engine.encoders.encoder import EncoderSpec


def encoder_spec(config: ModelConfig) -> EncoderSpec:
    """Raises ModelError for what the family does not compute."""
    spec: EncoderSpec = import_module(f"quire.engine.encoders.{ENCODERS[config.model_type]}").spec(config)
    return spec
