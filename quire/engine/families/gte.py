"""GTE's second architecture (Zhang et al., 2024, mGTE): BERT with scaled RoPE for long texts and a gated MLP. Used by
gte-*-en-v1.5, gte-multilingual-* and Snowflake's arctic-embed-m-v2.0.
"""

from __future__ import annotations

from dataclasses import replace

from quire.engine.architecture import EncoderSpec, EncoderWeightNames
from quire.engine.common.errors import ModelError
from quire.engine.families.base import EncoderFamily, ModelConfig, base_encoder_spec
from quire.engine.families.bert import BERT_CLASSIFIER, BERT_UNUSED_PREFIXES

_WEIGHT_NAMES = EncoderWeightNames(
    word_embeddings="embeddings.word_embeddings",
    token_type_embeddings="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    layer_template="encoder.layer.{}",
    qkv=("attention.qkv_proj",),
    out="attention.o_proj",
    attention_norm="attn_ln",
    up=("mlp.up_gate_proj",),
    down="mlp.down_proj",
    mlp_norm="mlp_ln",
)
UNPACKED_QKV_MODULES = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
_SUPPORTED_VALUES = {
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
}


def _build_gte_spec(config: ModelConfig) -> EncoderSpec:
    raw = config.raw
    for field, supported in _SUPPORTED_VALUES.items():
        if (value := raw.get(field)) not in (None, supported):
            raise ModelError(f"model: config.json: {field} {value!r} is not supported in a GTE model")
    segments = raw.get("type_vocab_size")
    return base_encoder_spec(
        config,
        ropes=(config.rope,) * config.num_layers,
        names=_WEIGHT_NAMES
        if raw.get("pack_qkv") in (None, True)
        else replace(_WEIGHT_NAMES, qkv=UNPACKED_QKV_MODULES),
        classifier=BERT_CLASSIFIER,
        segments=1 if segments is None else segments,
        up_bias=False,
        gated=True,
        gate_last=True,
        unused_prefixes=(*BERT_UNUSED_PREFIXES, "classifier."),
    )


GTE = EncoderFamily(
    model_types=("gte",),
    defaults={"rope_theta": 160_000.0, "max_position_embeddings": 8192},
    build_spec=_build_gte_spec,
)
GTE_NEW = EncoderFamily(
    model_types=("new",),
    build_spec=_build_gte_spec,
)
