"""Phi-3 and Phi-4 (Abdin et al., 2024): LongRoPE for long contexts, in a part of each head."""

from __future__ import annotations

from quire.engine.families.base.config_fields import field_reader
from quire.engine.families.base.family import Family
from quire.engine.families.base.ropes import longrope
from quire.engine.families.base.weight_names import FUSED, WeightNames

PHI3 = Family(
    model_types=("phi3",),
    defaults={"rms_norm_eps": 1e-05, "original_max_position_embeddings": 4096, "max_position_embeddings": 4096},
    rotates_part=True,
    has_longrope=True,
    attention={"rope": longrope, "window": field_reader("sliding_window")},
    weight_names=WeightNames(layer_modules=FUSED),
)
