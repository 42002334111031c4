"""Granite 3 and 4 (IBM, 2024): a Llama with four multipliers, of embeddings, residuals, scores and logits."""

from dataclasses import replace

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.models import llama
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    """The residual stream is held divided by what is multiplied to all that joins it: norms take no notice of a factor,
    but for their eps, which is divided by its square."""
    raw = config.raw
    unit = raw.get("residual_multiplier") or 1.0
    base = llama.spec(config).normed(NormSpec(config.norm_eps / unit**2))
    base = base.having(AttentionSpec, scale=raw.get("attention_multiplier") or 1.0)
    scale, logit_scale = (raw.get("embedding_multiplier") or 1.0) / unit, 1 / (raw.get("logits_scaling") or 1.0)
    return replace(base, embedding_scale=scale, stream_unit=unit, logit_scale=logit_scale)
