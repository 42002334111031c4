"""DeepSeek-V3 and R1 (DeepSeek-AI, 2024), Kimi K2 (Moonshot AI, 2025) and GLM-4.7-Flash (Z.ai, 2026): V2's attention,
and experts that are chosen by sigmoids with a correction."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.models.experts import grouped_experts
from quire.engine.models.latent import youtu
from quire.engine.models.latent.attention import with_experts
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    return with_experts(grouped_experts, youtu.spec(config), config)
