"""OPT (Zhang et al., 2022): GPT-2 with ReLU."""

from __future__ import annotations

from quire.engine.common.errors import ModelError
from quire.engine.families.base import ModelConfig, WeightNames, default_true_reader, layer_norm_family, max_position


def _check_opt_config(config: ModelConfig) -> None:
    for name in ("do_layer_norm_before", "layer_norm_elementwise_affine"):
        if config.raw.get(name) is False:
            raise ModelError(f"model: config.json: {name}: false is not supported")
    if config.raw.get("word_embed_proj_dim") not in (None, config.hidden_size):
        raise ModelError("model: config.json: word_embed_proj_dim: embeddings of another size are not supported")


OPT = layer_norm_family(
    model_types=("opt",),
    field_names={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
    defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-05, "hidden_act": "relu", "enable_bias": True},
    check_config=_check_opt_config,
    bias=default_true_reader("enable_bias"),
    attention={"rope": None},
    decoder={"positions": max_position},
    weight_names=WeightNames(
        model_modules={
            "embed_tokens": "embed_tokens",
            "embed_positions": "embed_positions",
            "final_layer_norm": "norm",
        },
        layer_modules={
            "self_attn_layer_norm": "input_layernorm",
            "final_layer_norm": "post_attention_layernorm",
            "self_attn.out_proj": "self_attn.o_proj",
            "fc1": "mlp.up_proj",
            "fc2": "mlp.down_proj",
        },
        position_offset=2,
    ),
)
