"""GLM-4-0414 (GLM Team, 2025): GLM with norms behind attention and the MLP too."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.mlp import MlpSpec
from quire.engine.models.dense import glm
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    return glm.spec(config).having(AttentionSpec, output_norm=True).having(MlpSpec, output_norm=True)
