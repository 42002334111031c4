"""ERNIE 4.5, dense (Baidu, 2025): a Llama with rotations of neighbours, and biases everywhere or nowhere."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.mlp import MlpSpec
from quire.engine.models.spec import DecoderSpec, base_spec


def spec(config: ModelConfig) -> DecoderSpec:
    bias = bool(config.raw.get("use_bias"))
    return base_spec(config).having(AttentionSpec, qkv_bias=bias, out_bias=bias).having(MlpSpec, bias=bias)
