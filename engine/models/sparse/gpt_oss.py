"""gpt-oss (OpenAI, 2025): experts in every layer, a sink in every head, and in every second layer a sliding window."""

from quire.engine.checkpoint.families import layer_windows
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.moe import ExpertsSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.models.experts import in_layers, routed
from quire.engine.models.spec import DecoderSpec, base_spec
from quire.kernels.activation import Clamp

_ALPHA, _LIMIT = 1.702, 7.0


def spec(config: ModelConfig) -> DecoderSpec:
    raw = config.raw
    experts = ExpertsSpec(
        *routed(config),
        intermediate_size=config.intermediate_size,
        norm=NormSpec(config.norm_eps),
        router_bias=True,
        bias=True,
        clamp=Clamp(raw.get("swiglu_alpha") or _ALPHA, raw.get("swiglu_limit") or _LIMIT),
        router="router",
    )
    windows, bias = layer_windows(raw, config.num_layers), raw.get("attention_bias") is not False
    base = base_spec(config).having(AttentionSpec, window=windows, qkv_bias=bias, out_bias=bias, sinks=True)
    return in_layers(experts, base, config)
