"""Gemma 2 (Gemma Team, 2024): norms after attention and the MLP too, capped scores and logits, and a sliding window in
every other layer."""

from dataclasses import replace

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.mlp import MlpSpec
from quire.engine.models import gemma
from quire.engine.models.decoder import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    raw = config.raw
    attention = {
        "window": layer_windows(config, global_every=2),
        "scale": (raw.get("query_pre_attn_scalar") or 256.0) ** -0.5,
        "softcap": raw.get("attn_logit_softcapping", 50.0),
    }
    base = replace(gemma.spec(config), logit_softcap=raw.get("final_logit_softcapping", 30.0))
    return base.having(AttentionSpec, output_norm=True, **attention).having(MlpSpec, output_norm=True)


def layer_windows(config: ModelConfig, global_every: int) -> list[int | None]:
    """Per layer, from layer_types; older files lack it: there every layer slides but each `global_every`-th."""
    window, layers = config.raw.get("sliding_window", 4096), range(1, config.num_layers + 1)
    default = ["sliding_attention" if layer % global_every else "full_attention" for layer in layers]
    types = config.raw.get("layer_types") or default
    return [window if kind == "sliding_attention" else None for kind in types]
