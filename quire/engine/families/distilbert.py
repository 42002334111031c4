"""DistilBERT (Sanh et al., 2019): BERT without segments."""

from __future__ import annotations

from dataclasses import replace

from quire.engine.architecture import EncoderSpec, EncoderWeightNames, parse_encoder_activation
from quire.engine.families.base import EncoderFamily, ModelConfig, two_layer_classifier_builder
from quire.engine.families.bert import BERT_UNUSED_PREFIXES, build_bert_spec

_WEIGHT_NAMES = EncoderWeightNames(
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


def _build_distilbert_spec(config: ModelConfig) -> EncoderSpec:
    return replace(
        build_bert_spec(config),
        names=_WEIGHT_NAMES,
        classifier=two_layer_classifier_builder("pre_classifier", "relu", "classifier"),
        segments=0,
        eps=1e-12,
        activation=parse_encoder_activation(config.raw.get("activation") or "gelu"),
        unused_prefixes=(*BERT_UNUSED_PREFIXES, "vocab_"),
    )


DISTILBERT = EncoderFamily(
    model_types=("distilbert",),
    field_names={
        "dim": "hidden_size",
        "hidden_dim": "intermediate_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
    },
    defaults={"max_position_embeddings": 512},
    build_spec=_build_distilbert_spec,
)
