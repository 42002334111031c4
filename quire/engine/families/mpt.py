"""MPT (MosaicML, 2023): ALiBi and no biases."""

from __future__ import annotations

from quire.engine.common.errors import ModelError
from quire.engine.families.base import (
    QKV_PROJECTIONS,
    ModelConfig,
    WeightNames,
    fill_intermediate_size,
    layer_norm_family,
    layer_norm_reader,
)


def _check_mpt_config(config: ModelConfig) -> None:
    raw, attention = config.raw, config.raw.get("attn_config") or {}
    if raw.get("no_bias") is False or raw.get("logit_scale") is not None:
        raise ModelError("model: config.json: no_bias: false and logit_scale of an 'mpt' are not supported")
    if attention.get("alibi") is False or any(attention.get(name) for name in ("clip_qkv", "qk_ln", "prefix_lm")):
        raise ModelError(
            "model: config.json: attn_config: without alibi, or with clip_qkv, qk_ln or prefix_lm, it is not supported"
        )


def _attention_scale(config: ModelConfig) -> float:
    return (config.raw.get("attn_config") or {}).get("softmax_scale") or config.head_dim**-0.5


MPT = layer_norm_family(
    model_types=("mpt",),
    field_names={
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings",
        "layer_norm_epsilon": "rms_norm_eps",
    },
    defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-05, "hidden_act": "gelu", "expansion_ratio": 4},
    fill_derived_fields=fill_intermediate_size,
    check_config=_check_mpt_config,
    bias=False,
    norm=layer_norm_reader(bias=False),
    attention={"rope": None, "alibi": 1.0, "scale": _attention_scale},
    weight_names=WeightNames(
        model_modules={"wte": "embed_tokens", "norm_f": "norm"},
        layer_modules={
            "norm_1": "input_layernorm",
            "norm_2": "post_attention_layernorm",
            "attn.Wqkv": QKV_PROJECTIONS,
            "attn.out_proj": "self_attn.o_proj",
            "ffn.up_proj": "mlp.up_proj",
            "ffn.down_proj": "mlp.down_proj",
        },
    ),
)
