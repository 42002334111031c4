"""GPT-NeoX and Pythia (Black et al., 2022): attention and the MLP side by side, each on a LayerNorm of its own."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.mlp import MlpSpec
from quire.engine.models.classic.layer_norm import plain_spec
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    bias, parallel = config.raw.get("attention_bias") is not False, config.raw.get("use_parallel_residual") is not False
    base = plain_spec(config, bias=True).having(AttentionSpec, qkv_bias=bias, out_bias=bias)
    return base.having(MlpSpec, parallel=parallel)
