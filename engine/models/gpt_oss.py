"""gpt-oss (OpenAI, 2025): experts in every layer, a sink in every head, and in every second layer a sliding window."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.moe import ExpertsSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.models.decoder import DecoderSpec, base_spec
from quire.engine.models.experts import expert_numbers, in_layers
from quire.kernels.backend import Clamp

_ALPHA, _LIMIT = 1.702, 7.0


def spec(config: ModelConfig) -> DecoderSpec:
    raw = config.raw
    experts = ExpertsSpec(
        *expert_numbers(config),
        intermediate_size=config.intermediate_size,
        normalized=True,
        norm=NormSpec(config.norm_eps),
        router_bias=True,
        bias=True,
        clamp=Clamp(raw.get("swiglu_alpha") or _ALPHA, raw.get("swiglu_limit") or _LIMIT),
        router="router",
    )
    window, bias = raw.get("sliding_window"), raw.get("attention_bias") is not False
    kinds = ("sliding_attention", "full_attention")
    types = raw.get("layer_types") or [kinds[layer % 2] for layer in range(config.num_layers)]
    windows = [window if kind == kinds[0] else None for kind in types]
    base = base_spec(config).having(AttentionSpec, window=windows, qkv_bias=bias, out_bias=bias, sinks=True)
    return in_layers(experts, base, config)
