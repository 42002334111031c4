"""Llama 2 and 3 (Touvron et al., 2023; Dubey et al., 2024), and the many models of that shape."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.mlp import MlpSpec
from quire.engine.models.spec import DecoderSpec, base_spec


def spec(config: ModelConfig) -> DecoderSpec:
    bias, mlp_bias = (bool(config.raw.get(name, False)) for name in ("attention_bias", "mlp_bias"))
    return base_spec(config).having(AttentionSpec, qkv_bias=bias, out_bias=bias).having(MlpSpec, bias=mlp_bias)
