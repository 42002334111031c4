"""GTE's second architecture (Zhang et al., 2024, mGTE): a BERT with rotated positions, stretched for longer texts than
it was trained on, and a gated MLP. gte-*-en-v1.5, gte-multilingual-* and Snowflake's arctic-embed-m-v2.0 are of it."""

from dataclasses import replace

from quire.engine.encoders import bert
from quire.engine.encoders.encoder import EncoderSpec, EncoderWeightNames, base_encoder_spec
from quire.engine.errors import ModelError
from quire.engine.families.base.model_config import ModelConfig

NAMES = EncoderWeightNames(
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
UNPACKED_QKV = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
_SUPPORTED_VALUES = {
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
}
"""Fields of config.json with the only value, also where they lack, that is computed here."""


def spec(config: ModelConfig) -> EncoderSpec:
    raw = config.raw
    for field, supported in _SUPPORTED_VALUES.items():
        if (value := raw.get(field)) not in (None, supported):
            raise ModelError(f"model: config.json: {field} {value!r} is not supported in a GTE model")
    segments = raw.get("type_vocab_size")
    return base_encoder_spec(
        config,
        ropes=(config.rope,) * config.num_layers,
        names=NAMES if raw.get("pack_qkv") in (None, True) else replace(NAMES, qkv=UNPACKED_QKV),
        classifier=bert.CLASSIFIER,
        segments=1 if segments is None else segments,
        up_bias=False,
        gated=True,
        gate_last=True,
        unused_prefixes=(*bert.UNUSED_PREFIXES, "classifier."),
    )
