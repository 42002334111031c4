"""OLMoE (Muennighoff et al., 2024): a Llama with experts in every layer, and norms of whole queries and keys."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.moe import ExpertsSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.models.experts import in_layers, routed
from quire.engine.models.spec import DecoderSpec, base_spec


def spec(config: ModelConfig) -> DecoderSpec:
    raw = config.raw
    if raw.get("clip_qkv") is not None:
        raise ModelError("model: config.json: clip_qkv of an 'olmoe' is not supported")
    routing = routed(config, normalized=bool(raw.get("norm_topk_prob")))
    experts = ExpertsSpec(*routing, config.intermediate_size, NormSpec(config.norm_eps))
    bias = bool(raw.get("attention_bias"))
    base = base_spec(config).having(AttentionSpec, qk_norm="whole", qkv_bias=bias, out_bias=bias)
    return in_layers(experts, base, config)
