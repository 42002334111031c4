"""Mamba (Gu and Dao, 2023): selective scans alone."""

from __future__ import annotations

from typing import Any

from quire.engine.families.base.attention_free import ATTENTION_FREE_MODULES, attention_free_builder
from quire.engine.families.base.family import Family
from quire.engine.families.base.layer_types import complete_layer_types
from quire.engine.families.base.mamba_fields import (
    MAMBA_DEFAULTS,
    MAMBA_MODULES,
    MAMBA_NAMES,
    complete_mamba,
    mamba_spec,
)
from quire.engine.families.base.weight_names import WeightNames


def complete_attention_free_mamba(fields: dict[str, Any]) -> None:
    """There are neither attention nor MLPs, whose sizes other code wants to know all the same."""
    complete_mamba(fields, inner_size=fields.get("mamba_d_ssm"))
    if isinstance(inner := fields.get("mamba_d_ssm"), int):
        heads, head_size = fields["mamba_n_heads"], fields["mamba_d_head"]
        fields |= {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": head_size}
        fields["intermediate_size"] = inner
    fields["layer_types"] = None
    complete_layer_types(fields, lambda layer: "linear_attention")


MAMBA = Family(
    model_types=("mamba",),
    field_names=MAMBA_NAMES,
    defaults={**MAMBA_DEFAULTS, "rms_norm_eps": 1e-05, "tie_word_embeddings": True, "max_position_embeddings": 131_072},
    complete=complete_attention_free_mamba,
    other_layer_types=("linear_attention",),
    build=attention_free_builder(mamba_spec),
    weight_names=WeightNames(
        model_modules=ATTENTION_FREE_MODULES,
        layer_modules={
            "norm": "input_layernorm",
            "mixer": "mamba",
            **{name.replace("mamba.", "mixer."): own for name, own in MAMBA_MODULES.items()},
            **{f"mixer.{name}": f"mamba.{name}" for name in ("conv1d", "dt_proj", "out_proj")},
        },
    ),
)
