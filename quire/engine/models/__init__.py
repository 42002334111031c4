from __future__ import annotations

from importlib import import_module

from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.checkpoint.family_spec import build_decoder_spec
from quire.engine.families.base.model_config import ModelConfig


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    """Raises ModelError."""
    if config.transformers_config is None:
        return build_decoder_spec(config)
    spec: DecoderSpec = import_module("quire.engine.models.transformers_backend.spec").transformers_spec(config)
    return spec
