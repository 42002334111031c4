"""Gemma 2 (Gemma Team, 2024): norms behind attention and the MLP too, capped scores and logits, and a sliding window in
every other layer."""

from __future__ import annotations

from quire.engine.families.base.layer_types import sliding_windows
from quire.engine.families.gemma import GEMMA

GEMMA2 = GEMMA.derive(
    "gemma2",
    defaults={**GEMMA.defaults, "sliding_window_pattern": 2},
    missing_defaults={"num_key_value_heads": 4, "sliding_window": 4096},
    attention={
        "window": sliding_windows,
        "scale": lambda config: (config.raw.get("query_pre_attn_scalar") or 256.0) ** -0.5,
        "softcap": lambda config: config.raw.get("attn_logit_softcapping", 50.0),
        "output_norm": True,
    },
    mlp={"output_norm": True},
    decoder={"logit_softcap": lambda config: config.raw.get("final_logit_softcapping", 30.0)},
)
