"""BERT (Devlin et al., 2019) and many small models of its shape, such as MiniLM."""

from __future__ import annotations

from quire.engine.architecture import EncoderSpec, EncoderWeightNames
from quire.engine.common.errors import ModelError
from quire.engine.families.base import EncoderFamily, ModelConfig, base_encoder_spec, two_layer_classifier_builder

_WEIGHT_NAMES = EncoderWeightNames(
    word_embeddings="embeddings.word_embeddings",
    position_embeddings="embeddings.position_embeddings",
    token_type_embeddings="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    layer_template="encoder.layer.{}",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up=("intermediate.dense",),
    down="output.dense",
    mlp_norm="output.LayerNorm",
)
BERT_UNUSED_PREFIXES = ("embeddings.position_ids", "embeddings.token_type_ids", "cls.", "pooler.", "lm_head.")
"""Buffers and training heads are not loaded."""
BERT_CLASSIFIER = two_layer_classifier_builder("pooler.dense", "tanh", "classifier")


def build_bert_spec(config: ModelConfig) -> EncoderSpec:
    raw = config.raw
    if (kind := raw.get("position_embedding_type") or "absolute") != "absolute":
        raise ModelError(f"model: config.json: position_embedding_type {kind!r} is not supported")
    return base_encoder_spec(
        config,
        names=_WEIGHT_NAMES,
        classifier=BERT_CLASSIFIER,
        positions=config.max_position,
        segments=raw.get("type_vocab_size") or 2,
        unused_prefixes=BERT_UNUSED_PREFIXES,
    )


BERT = EncoderFamily(
    model_types=("bert",),
    defaults={"max_position_embeddings": 512},
    build_spec=build_bert_spec,
)
