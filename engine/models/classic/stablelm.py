"""StableLM (Stability AI, 2023): a Llama with LayerNorms, and rotations in a quarter of each head."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.mlp import MlpSpec
from quire.engine.models.classic.layer_norm import layer_norm_spec
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    raw = config.raw
    if raw.get("qk_layernorm"):
        raise ModelError("model: config.json: qk_layernorm of a 'stablelm' is not supported")
    parallel, bias = bool(raw.get("use_parallel_residual")), bool(raw.get("use_qkv_bias"))
    base = layer_norm_spec(config).having(AttentionSpec, qkv_bias=bias)
    return base.having(MlpSpec, parallel=parallel, shares_norm=parallel)
