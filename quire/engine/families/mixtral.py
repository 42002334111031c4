"""Mixtral (Jiang et al., 2024): Mistral, with no sliding window but config.json's own, and experts in every layer."""

from __future__ import annotations

from quire.engine.families.base.config_fields import field_reader
from quire.engine.families.base.family import Family
from quire.engine.families.base.moe_fields import BLOCK_SPARSE_MOE, moe_reader

MIXTRAL = Family(
    model_types=("mixtral",),
    defaults={"rms_norm_eps": 1e-05, "rope_theta": 1_000_000.0, "max_position_embeddings": 131_072},
    missing_defaults={"num_key_value_heads": 8},
    attention={"window": field_reader("sliding_window")},
    experts=moe_reader(**BLOCK_SPARSE_MOE),
)
