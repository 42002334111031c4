"""OLMo 2 (OLMo Team, 2024): norms of whole queries and keys; norms behind attention and the MLP instead of before
them."""

from __future__ import annotations

from quire.engine.families.base.config_fields import POST_NORMS, attention_bias_readers
from quire.engine.families.base.family import Family

OLMO2 = Family(
    model_types=("olmo2",),
    defaults={"rms_norm_eps": 1e-05},
    attention={"qk_norm": "whole", **attention_bias_readers("attention_bias"), **POST_NORMS},
    mlp=POST_NORMS,
)
