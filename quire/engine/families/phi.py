"""Phi-1 to Phi-2 (Gunasekar et al., 2023): parallel attention and MLP with one norm."""

from __future__ import annotations

from quire.engine.families.base import PARALLEL_MLP, WeightNames, has_untied_head, layer_norm_family

PHI = layer_norm_family(
    model_types=("phi",),
    field_names={"layer_norm_eps": "rms_norm_eps"},
    defaults={"rms_norm_eps": 1e-05, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
    has_partial_rotary=True,
    unsupported_fields={"qk_layernorm": "of a 'phi' is not supported"},
    mlp=PARALLEL_MLP,
    decoder={"head_bias": has_untied_head},
    weight_names=WeightNames(
        model_modules={"final_layernorm": "norm"},
        layer_modules={"self_attn.dense": "self_attn.o_proj", "mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"},
    ),
)
