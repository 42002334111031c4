"""DistilBERT (Sanh et al., 2019): a BERT without segments and under other names."""

from dataclasses import replace

from quire.engine.encoders import bert
from quire.engine.encoders.encoder import (
    EncoderSpec,
    EncoderWeightNames,
    make_two_layer_classifier_builder,
    parse_activation,
)
from quire.engine.families.base.model_config import ModelConfig

NAMES = EncoderWeightNames(
    word_embeddings="embeddings.word_embeddings",
    position_embeddings="embeddings.position_embeddings",
    embedding_norm="embeddings.LayerNorm",
    layer_template="transformer.layer.{}",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out="attention.out_lin",
    attention_norm="sa_layer_norm",
    up=("ffn.lin1",),
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
)


def spec(config: ModelConfig) -> EncoderSpec:
    return replace(
        bert.spec(config),
        names=NAMES,
        classifier=make_two_layer_classifier_builder("pre_classifier", "relu", "classifier"),
        segments=0,
        eps=1e-12,
        activation=parse_activation(config.raw.get("activation") or "gelu"),
        unused_prefixes=(*bert.UNUSED_PREFIXES, "vocab_"),
    )
