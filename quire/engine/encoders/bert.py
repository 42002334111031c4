"""BERT (Devlin et al., 2019) and the many small models of its shape, such as MiniLM."""

from quire.engine.encoders.encoder import (
    EncoderSpec,
    EncoderWeightNames,
    base_encoder_spec,
    make_two_layer_classifier_builder,
)
from quire.engine.errors import ModelError
from quire.engine.families.base.model_config import ModelConfig

NAMES = EncoderWeightNames(
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
UNUSED_PREFIXES = ("embeddings.position_ids", "embeddings.token_type_ids", "cls.", "pooler.", "lm_head.")
"""What checkpoints keep of the training's own heads."""
CLASSIFIER = make_two_layer_classifier_builder("pooler.dense", "tanh", "classifier")


def spec(config: ModelConfig) -> EncoderSpec:
    raw = config.raw
    if (kind := raw.get("position_embedding_type") or "absolute") != "absolute":
        raise ModelError(f"model: config.json: position_embedding_type {kind!r} is not supported")
    return base_encoder_spec(
        config,
        names=NAMES,
        classifier=CLASSIFIER,
        positions=config.max_position,
        segments=raw.get("type_vocab_size") or 2,
        unused_prefixes=UNUSED_PREFIXES,
    )
