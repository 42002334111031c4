"""DeepSeek-V2 (DeepSeek-AI, 2024): latent attention, whose rotations turn neighbours."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.models.decoder import DecoderSpec, base_spec
from quire.engine.models.latent.attention import in_latents


def spec(config: ModelConfig) -> DecoderSpec:
    return in_latents(base_spec(config), config)
