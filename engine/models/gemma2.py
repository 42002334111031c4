"""Gemma 2 (Gemma Team, 2024): norms after attention and the MLP too, capped scores and logits, and a sliding window in
every other layer."""

from dataclasses import replace

from quire.engine.checkpoint.families import layer_windows
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.mlp import MlpSpec
from quire.engine.models import gemma
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    raw = config.raw
    attention = {
        "window": layer_windows(raw, config.num_layers),
        "scale": (raw.get("query_pre_attn_scalar") or 256.0) ** -0.5,
        "softcap": raw.get("attn_logit_softcapping", 50.0),
    }
    base = replace(gemma.spec(config), logit_softcap=raw.get("final_logit_softcapping", 30.0))
    return base.having(AttentionSpec, output_norm=True, **attention).having(MlpSpec, output_norm=True)
