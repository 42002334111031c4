"""RoBERTa (Liu et al., 2019), XLM-RoBERTa (Conneau et al., 2020) and CamemBERT: a BERT whose positions begin behind the
id of padding."""

from dataclasses import replace

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.encoders import bert
from quire.engine.encoders.encoder import EncoderSpec
from quire.engine.layers.heads import Stage


def classifier(hidden: int, labels: int) -> list[Stage]:
    dense = Stage("classifier.dense", hidden, hidden, activation="tanh")
    return [dense, Stage("classifier.out_proj", hidden, labels)]


def spec(config: ModelConfig) -> EncoderSpec:
    padding = config.raw.get("pad_token_id")
    return replace(
        bert.spec(config),
        classifier=classifier,
        first_position=1 + (1 if padding is None else padding),
        segments=config.raw.get("type_vocab_size") or 1,
    )
