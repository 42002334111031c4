"""GPT-J (Wang and Komatsuzaki, 2021): partial interleaved RoPE, a head with bias."""

from __future__ import annotations

from quire.engine.families.base import (
    PARALLEL_MLP,
    WeightNames,
    fill_intermediate_size,
    has_untied_head,
    layer_norm_family,
)
from quire.engine.families.gpt2 import GPT2_BUFFERS, GPT2_FIELD_NAMES

GPTJ = layer_norm_family(
    model_types=("gptj",),
    field_names=GPT2_FIELD_NAMES,
    defaults={"rms_norm_eps": 1e-05, "hidden_act": "gelu_new", "rotary_dim": 64},
    fill_derived_fields=fill_intermediate_size,
    attention={"qkv_bias": False, "out_bias": False},
    mlp=PARALLEL_MLP,
    decoder={"head_bias": has_untied_head},
    weight_names=WeightNames(
        model_modules={"wte": "embed_tokens", "ln_f": "norm"},
        layer_modules={
            **{f"attn.{name}_proj": f"self_attn.{name}_proj" for name in "qkv"},
            "attn.out_proj": "self_attn.o_proj",
            "ln_1": "input_layernorm",
            "mlp.fc_in": "mlp.up_proj",
            "mlp.fc_out": "mlp.down_proj",
        },
        has_interleaved_rope=True,
        unused_tensors=(*GPT2_BUFFERS, "attn.embed_positions"),
    ),
)
