"""RoBERTa (Liu et al., 2019), XLM-RoBERTa (Conneau et al., 2020) and CamemBERT: a BERT whose positions begin behind the
id of padding."""

from dataclasses import replace

from quire.engine.encoders import bert
from quire.engine.encoders.encoder import EncoderSpec, make_two_layer_classifier_builder
from quire.engine.families.base.model_config import ModelConfig


def spec(config: ModelConfig) -> EncoderSpec:
    padding = config.raw.get("pad_token_id")
    return replace(
        bert.spec(config),
        classifier=make_two_layer_classifier_builder("classifier.dense", "tanh", "classifier.out_proj"),
        first_position=1 + (1 if padding is None else padding),
        segments=config.raw.get("type_vocab_size") or 1,
    )
