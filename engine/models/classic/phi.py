"""Phi-1 to Phi-2 (Gunasekar et al., 2023): attention and the MLP side by side on one LayerNorm, biases everywhere."""

from dataclasses import replace

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.mlp import MlpSpec
from quire.engine.models.classic.layer_norm import plain_spec
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    if config.raw.get("qk_layernorm"):
        raise ModelError("model: config.json: qk_layernorm of a 'phi' is not supported")
    base = plain_spec(config, bias=True).having(MlpSpec, parallel=True, shares_norm=True)
    return replace(base, head_bias=not config.tie_embeddings)
