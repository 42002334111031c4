"""StableLM (Stability AI, 2023): a Llama with LayerNorms, and rotations in a quarter of each head."""

from __future__ import annotations

from quire.engine.families.base.config_fields import flag_reader
from quire.engine.families.base.family import Family
from quire.engine.families.base.layer_norms import layer_norm_reader

STABLELM = Family(
    model_types=("stablelm",),
    field_names={"layer_norm_eps": "rms_norm_eps"},
    defaults={"rms_norm_eps": 1e-05, "partial_rotary_factor": 0.25, "max_position_embeddings": 4096},
    rotates_part=True,
    unsupported_fields={"qk_layernorm": "of a 'stablelm' is not supported"},
    norm=layer_norm_reader(),
    attention={"qkv_bias": flag_reader("use_qkv_bias")},
    mlp={"parallel": flag_reader("use_parallel_residual"), "shares_norm": flag_reader("use_parallel_residual")},
)
