"""FlexOLMo (Shi et al., 2025): OLMo 2 with experts in every layer."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.moe import ExpertsSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.models.dense import olmo2
from quire.engine.models.experts import in_layers, routed
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    routing = routed(config, normalized=bool(config.raw.get("norm_topk_prob")))
    sizes = (config.intermediate_size, NormSpec(config.norm_eps))
    experts = ExpertsSpec(*routing, *sizes, input_norm=False, output_norm=True)
    return in_layers(experts, olmo2.spec(config), config)
