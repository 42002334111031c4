"""GLM-4-0414 (GLM Team, 2025): additional post-norms."""

from __future__ import annotations

from quire.engine.families.base import GATE_UP_PROJECTIONS, LAYER_MODULES, POST_NORM_MODULES, GGUFFormat, WeightNames
from quire.engine.families.glm import GLM

GLM4 = GLM.derive(
    "glm4",
    attention={"output_norm": True},
    mlp={"output_norm": True},
    weight_names=WeightNames(
        layer_modules={
            "mlp.gate_up_proj": GATE_UP_PROJECTIONS,
            "post_self_attn_layernorm": "post_attention_layernorm",
            "post_attention_layernorm": "pre_feedforward_layernorm",
            "post_mlp_layernorm": "post_feedforward_layernorm",
        },
        has_interleaved_rope=True,
    ),
    gguf=GGUFFormat(
        architectures=("glm4",),
        layer_modules={**LAYER_MODULES, **POST_NORM_MODULES, "ffn_up": "mlp.gate_up_proj"},
    ),
)
