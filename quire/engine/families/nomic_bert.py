"""Nomic Embed (Nussbaum et al., 2024): BERT with RoPE and a gated MLP."""

from __future__ import annotations

from quire.engine.architecture import EncoderSpec, EncoderWeightNames
from quire.engine.common.errors import ModelError
from quire.engine.families.base import EncoderFamily, ModelConfig, base_encoder_spec
from quire.engine.families.bert import BERT_CLASSIFIER, BERT_UNUSED_PREFIXES

_WEIGHT_NAMES = EncoderWeightNames(
    word_embeddings="embeddings.word_embeddings",
    token_type_embeddings="embeddings.token_type_embeddings",
    embedding_norm="emb_ln",
    layer_template="encoder.layers.{}",
    qkv=("attn.Wqkv",),
    out="attn.out_proj",
    attention_norm="norm1",
    up=("mlp.fc12", "mlp.fc11"),
    down="mlp.fc2",
    mlp_norm="norm2",
)


def _build_nomic_bert_spec(config: ModelConfig) -> EncoderSpec:
    raw = config.raw
    if raw.get("prenorm") or raw.get("qkv_proj_bias") or raw.get("mlp_fc1_bias") or raw.get("rotary_scaling_factor"):
        unsupported = "prenorm, biases of linears and rotary_scaling_factor"
        raise ModelError(f"model: config.json: {unsupported} are not supported in a Nomic BERT")
    theta = raw.get("rotary_emb_base") or (raw.get("rope_parameters") or {}).get("rope_theta") or 1000.0
    return base_encoder_spec(
        config,
        names=_WEIGHT_NAMES,
        classifier=BERT_CLASSIFIER,
        eps=raw.get("layer_norm_epsilon") or raw.get("layer_norm_eps") or 1e-12,
        activation="silu",
        ropes=({"rope_type": "default", "rope_theta": theta},) * config.num_layers,
        segments=raw.get("type_vocab_size") or 0,
        bias=False,
        gated=True,
        unused_prefixes=BERT_UNUSED_PREFIXES,
    )


NOMIC_BERT = EncoderFamily(
    model_types=("nomic_bert",),
    field_names={
        "n_embd": "hidden_size",
        "n_inner": "intermediate_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
    },
    defaults={"type_vocab_size": 2},
    build_spec=_build_nomic_bert_spec,
)
