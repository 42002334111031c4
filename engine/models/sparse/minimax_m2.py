"""MiniMax-M2 (MiniMax, 2025): experts in every layer, weighed by sigmoids; norms of whole queries and keys, which are
rotated in part."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.moe import ExpertsSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.models.experts import in_layers, routed
from quire.engine.models.spec import DecoderSpec, base_spec


def spec(config: ModelConfig) -> DecoderSpec:
    experts = ExpertsSpec(
        *routed(config, weights="sigmoid"),
        config.intermediate_size,
        NormSpec(config.norm_eps),
        float_router=True,
        correction="e_score_correction_bias",
        name="block_sparse_moe",
        gate="w1",
        up="w3",
        down="w2",
    )
    return in_layers(experts, base_spec(config).having(AttentionSpec, qk_norm="whole"), config)
