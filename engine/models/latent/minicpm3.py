"""MiniCPM 3 (OpenBMB, 2024): latent attention, whose rotations turn halves, and multipliers of embeddings, residuals
and logits."""

from dataclasses import replace

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.norm import NormSpec
from quire.engine.models.latent.attention import in_latents
from quire.engine.models.spec import DecoderSpec, base_spec


def spec(config: ModelConfig) -> DecoderSpec:
    """The residual stream is held divided by the multiplier of what joins it, as Granite's."""
    raw = config.raw
    unit = (raw.get("scale_depth") or config.num_layers**0.5) / config.num_layers**0.5
    norm = NormSpec(config.norm_eps / unit**2)
    logit_scale = (raw.get("dim_model_base") or config.hidden_size) / config.hidden_size
    embedding_scale = (raw.get("scale_emb") or 12.0) / unit
    base = base_spec(config).normed(norm)
    base = replace(base, embedding_scale=embedding_scale, stream_unit=unit, logit_scale=logit_scale)
    return in_latents(base, replace(config, norm_eps=norm.eps), neighbours=False)
