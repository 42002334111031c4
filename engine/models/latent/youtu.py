"""Youtu-LLM (Tencent, 2026): DeepSeek-V3's attention with an MLP in every layer."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.models.latent.attention import in_latents
from quire.engine.models.spec import DecoderSpec, base_spec


def spec(config: ModelConfig) -> DecoderSpec:
    return in_latents(base_spec(config), config, neighbours=config.raw.get("rope_interleave") is not False)
