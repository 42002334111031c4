"""OLMoE (Muennighoff et al., 2024): norms of whole queries and keys."""

from __future__ import annotations

from quire.engine.families.base.config_fields import attention_bias_readers
from quire.engine.families.base.family import Family
from quire.engine.families.base.moe_fields import NORMALIZED_ROUTING, moe_reader

OLMOE = Family(
    model_types=("olmoe",),
    defaults={"rms_norm_eps": 1e-05, "max_position_embeddings": 4096},
    unsupported_fields={"clip_qkv": "of an 'olmoe' is not supported"},
    attention={"qk_norm": "whole", **attention_bias_readers("attention_bias")},
    experts=moe_reader(NORMALIZED_ROUTING),
)
