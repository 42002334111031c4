"""K-EXAONE (LG AI Research, 2025): EXAONE 4's attention behind norms, and DeepSeek-V3's experts."""

from dataclasses import replace

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.mlp import MlpSpec
from quire.engine.models.dense import exaone4
from quire.engine.models.experts import grouped_experts, in_layers
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    before = {"input_norm": True, "output_norm": False}
    base = exaone4.spec(config).having(AttentionSpec, **before).having(MlpSpec, **before)
    experts = replace(grouped_experts(config), correction="e_score_correction_bias")
    return in_layers(experts, base, config)
