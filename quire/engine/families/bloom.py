"""BLOOM (Le Scao et al., 2022): ALiBi and an embedding norm."""

from __future__ import annotations

from quire.engine.families.base import (
    QKV_PROJECTIONS,
    LayerModules,
    WeightNames,
    fill_intermediate_size,
    layer_norm_family,
)
from quire.engine.families.gpt2 import GPT2_FIELD_NAMES
from quire.engine.families.gpt_neox import MEGATRON_MLP_MODULES

BLOOM_FIELD_NAMES = {
    **GPT2_FIELD_NAMES,
    "n_embed": "hidden_size",
    "num_kv_heads": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "activation": "hidden_act",
    "bias": "use_bias",
}
BLOOM_LAYER_MODULES: LayerModules = {
    **MEGATRON_MLP_MODULES,
    "self_attention.query_key_value": QKV_PROJECTIONS,
    "self_attention.dense": "self_attn.o_proj",
    "ln_attn": "input_layernorm",
    "ln_mlp": "post_attention_layernorm",
}
BLOOM = layer_norm_family(
    model_types=("bloom",),
    field_names=BLOOM_FIELD_NAMES,
    defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-05, "hidden_act": "gelu_new"},
    fill_derived_fields=fill_intermediate_size,
    unsupported_fields={"apply_residual_connection_post_layernorm": "is not supported"},
    attention={"rope": None, "alibi": 1.0},
    decoder={"embedding_norm": True},
    weight_names=WeightNames(
        model_modules={
            "word_embeddings": "embed_tokens",
            "word_embeddings_layernorm": "embed_norm",
            "ln_f": "norm",
        },
        layer_modules=BLOOM_LAYER_MODULES,
        is_fused_by_kv_head=True,
    ),
)
