"""Phi-3.5-MoE (Abdin et al., 2024): Phi-3's rotations, LayerNorms, and two experts by SparseMixer in every layer."""

from dataclasses import replace

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.moe import ExpertsSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.models.dense import phi3
from quire.engine.models.experts import in_layers, routed
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    raw, norm = config.raw, NormSpec(config.norm_eps, centred=True, bias=True)
    jitter = raw.get("router_jitter_noise")
    count, routing = routed(config, weights="mixer", jitter=0.01 if jitter is None else jitter)
    if routing.per_token != 2:
        raise ModelError(f"model: config.json: num_experts_per_tok: {routing.per_token}, where a 'phimoe' has 2")
    experts = ExpertsSpec(
        count,
        routing,
        config.intermediate_size,
        norm,
        name="block_sparse_moe",
        gate="w1",
        up="w3",
        down="w2",
    )
    bias, base = bool(raw.get("attention_bias")), phi3.spec(replace(config, rope=_rope(config)))
    base = base.normed(norm).having(AttentionSpec, qkv_bias=bias, out_bias=bias)
    return replace(in_layers(experts, base, config), head_bias=bool(raw.get("lm_head_bias")))


def _rope(config: ModelConfig) -> dict[str, object]:
    """What is rotated is multiplied by a number that config.json gives, for short contexts and for long ones."""
    rope = dict(config.rope)
    short, long = (rope.pop(f"{name}_mscale", None) for name in ("short", "long"))
    if short != long:
        raise ModelError(f"model: config.json: rope_scaling: short_mscale {short} and long_mscale {long} must be equal")
    return rope if short is None else rope | {"attention_factor": short}
