"""Jamba (AI21 Labs, 2024): selective scans in most layers, attention without positions in the others, and experts in
some MLPs' place, whose weights are not divided by their sum."""

from quire.engine.checkpoint.families import sparse_layers
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.moe import ExpertsSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.models.experts import in_layers, routed
from quire.engine.models.recurrent.selective_scan import selective_scan
from quire.engine.models.spec import DecoderSpec, base_spec


def spec(config: ModelConfig) -> DecoderSpec:
    base, norm = base_spec(config).having(AttentionSpec, rope=None), NormSpec(config.norm_eps)
    scan = selective_scan(config, inner_norm="learned", inner_eps=config.norm_eps)
    base = base.mixing([scan if kind == "linear_attention" else None for kind in config.raw.get("layer_types") or ()])
    if not any(sparse_layers(config.raw, config.num_layers)):
        return base
    width, routing = config.intermediate_size, routed(config, normalized=False)
    return in_layers(ExpertsSpec(*routing, width, norm, name="feed_forward", router="router"), base, config)
