"""Hunyuan, dense (Tencent, 2025): QK norms after RoPE."""

from __future__ import annotations

from quire.engine.families.base import GGUFFormat, WeightNames
from quire.engine.families.llama import LLAMA

HUNYUAN_V1_DENSE = LLAMA.derive(
    "hunyuan_v1_dense",
    defaults={"rms_norm_eps": 1e-05},
    attention={"qk_norm": "after"},
    weight_names=WeightNames(
        layer_modules={"self_attn.query_layernorm": "self_attn.q_norm", "self_attn.key_layernorm": "self_attn.k_norm"}
    ),
    gguf=GGUFFormat(
        architectures=("hunyuan-dense",),
    ),
)
