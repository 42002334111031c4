"""DeepSeek-V3 and R1 (DeepSeek-AI, 2024), and Kimi K2 (Moonshot AI, 2025): as V2, with another router."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.models.decoder import DecoderSpec, base_spec
from quire.engine.models.latent.attention import in_latents


def spec(config: ModelConfig) -> DecoderSpec:
    return in_latents(base_spec(config), config, neighbours=config.raw.get("rope_interleave") is not False)
