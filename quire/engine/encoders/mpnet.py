"""MPNet (Song et al., 2020): a BERT without segments, whose layers share biases of relative positions."""

from dataclasses import replace

from quire.engine.encoders import roberta
from quire.engine.encoders.encoder import EncoderSpec, EncoderWeightNames
from quire.engine.families.base.model_config import ModelConfig

NAMES = EncoderWeightNames(
    word_embeddings="embeddings.word_embeddings",
    position_embeddings="embeddings.position_embeddings",
    embedding_norm="embeddings.LayerNorm",
    relative_attention_bias="encoder.relative_attention_bias",
    layer_template="encoder.layer.{}",
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    out="attention.attn.o",
    attention_norm="attention.LayerNorm",
    up=("intermediate.dense",),
    down="output.dense",
    mlp_norm="output.LayerNorm",
)


def spec(config: ModelConfig) -> EncoderSpec:
    return replace(
        roberta.spec(config),
        names=NAMES,
        first_position=2,
        segments=0,
        num_buckets=config.raw.get("relative_attention_num_buckets") or 32,
    )
