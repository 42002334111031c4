"""MiniCPM 3 (OpenBMB, 2024): latent attention, whose rotations turn halves, and multipliers of embeddings, residuals
and logits."""

from dataclasses import replace

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.norm import NormSpec
from quire.engine.models.decoder import DecoderSpec, base_spec
from quire.engine.models.latent.attention import in_latents


def spec(config: ModelConfig) -> DecoderSpec:
    """The residual stream is held divided by the multiplier of what joins it, as Granite's."""
    raw = config.raw
    unit = raw["scale_depth"] / config.num_layers**0.5 if raw.get("scale_depth") else 1.0
    norm = NormSpec(config.norm_eps / unit**2)
    scales = {"embedding_scale": (raw.get("scale_emb") or 12.0) / unit, "stream_unit": unit}
    base = replace(base_spec(config).normed(norm), **scales)
    if model := raw.get("dim_model_base"):
        base = replace(base, logit_scale=model / config.hidden_size)
    return in_latents(base, replace(config, norm_eps=norm.eps), neighbours=False)
