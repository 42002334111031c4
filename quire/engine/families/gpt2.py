"""GPT-2 (Radford et al., 2019): learned positions."""

from __future__ import annotations

from quire.engine.families.base import (
    QKV_PROJECTIONS,
    GGUFFormat,
    LayerModules,
    ModelConfig,
    WeightNames,
    fill_intermediate_size,
    layer_norm_family,
    max_position,
)

GPT2_FIELD_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
}
GPT2_MODEL_MODULES = {"wte": "embed_tokens", "wpe": "embed_positions", "ln_f": "norm"}
GPT2_LAYER_MODULES: LayerModules = {
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.c_attn": QKV_PROJECTIONS,
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
GPT2_BUFFERS = ("attn.bias", "attn.masked_bias")


def _attention_scales(config: ModelConfig) -> list[float]:
    scale = 1.0 if config.raw.get("scale_attn_weights") is False else config.head_dim**-0.5
    by_layer = config.raw.get("scale_attn_by_inverse_layer_idx")
    return [scale / (layer + 1 if by_layer else 1) for layer in range(config.num_layers)]


GPT2 = layer_norm_family(
    model_types=("gpt2",),
    field_names=GPT2_FIELD_NAMES,
    defaults={
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-05,
        "hidden_act": "gelu_new",
        "max_position_embeddings": 1024,
    },
    fill_derived_fields=fill_intermediate_size,
    unsupported_fields={"add_cross_attention": "is not supported: it makes a part of another model"},
    attention={"rope": None, "scale": _attention_scales},
    decoder={"positions": max_position},
    weight_names=WeightNames(
        model_modules=GPT2_MODEL_MODULES,
        layer_modules=GPT2_LAYER_MODULES,
        transposed_modules=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
        unused_tensors=GPT2_BUFFERS,
    ),
    gguf=GGUFFormat(
        architectures=("gpt2",),
    ),
)
