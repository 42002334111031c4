"""RoBERTa (Liu et al., 2019), XLM-RoBERTa (Conneau et al., 2020) and CamemBERT: BERT with positions that start after
the padding id.
"""

from __future__ import annotations

from dataclasses import replace

from quire.engine.architecture import EncoderSpec
from quire.engine.families.base import EncoderFamily, ModelConfig, two_layer_classifier_builder
from quire.engine.families.bert import build_bert_spec


def build_roberta_spec(config: ModelConfig) -> EncoderSpec:
    padding = config.raw.get("pad_token_id")
    return replace(
        build_bert_spec(config),
        classifier=two_layer_classifier_builder("classifier.dense", "tanh", "classifier.out_proj"),
        first_position=1 + (1 if padding is None else padding),
        segments=config.raw.get("type_vocab_size") or 1,
    )


ROBERTA = EncoderFamily(
    model_types=(
        "roberta",
        "xlm-roberta",
        "camembert",
    ),
    defaults={"type_vocab_size": 2, "max_position_embeddings": 512},
    build_spec=build_roberta_spec,
)
