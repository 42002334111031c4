"""Mamba (Gu and Dao, 2023) and Falcon Mamba (TII, 2024), which norms what steps, b and c are made of: selective scans
alone, without attention and without MLPs."""

from typing import Any

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.norm import NormSpec
from quire.engine.models.recurrent.selective_scan import selective_scan
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    rules: dict[str, Any] = {}
    if config.model_type == "falcon_mamba":
        rules = {"inner_norm": "plain", "inner_eps": config.raw.get("mixer_rms_eps") or 0.0}
    layers = ((selective_scan(config, **rules),),) * config.num_layers
    shape = (config.vocab_size, config.hidden_size, layers, NormSpec(config.norm_eps))
    return DecoderSpec(*shape, tie_embeddings=config.tie_embeddings)
