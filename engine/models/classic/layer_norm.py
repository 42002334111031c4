"""What families with LayerNorms begin with."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.mlp import MlpSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.models.activations import activation_of
from quire.engine.models.spec import DecoderSpec, base_spec


def layer_norm_spec(config: ModelConfig, *, bias: bool = True) -> DecoderSpec:
    """Llama's layers with LayerNorms. bias: theirs."""
    return base_spec(config).normed(NormSpec(config.norm_eps, centred=True, bias=bias))


def plain_spec(config: ModelConfig, *, bias: bool, norm_bias: bool = True) -> DecoderSpec:
    """The same with MLPs without gates. bias: of all linears of the layers."""
    activation = activation_of(config)
    if activation in (None, "silu"):
        raise ModelError(f"model: hidden_act {activation!r} is not supported in a {config.model_type!r}")
    base = layer_norm_spec(config, bias=norm_bias).having(AttentionSpec, qkv_bias=bias, out_bias=bias)
    return base.having(MlpSpec, gated=False, activation=activation, bias=bias)
