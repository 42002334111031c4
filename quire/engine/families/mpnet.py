"""MPNet (Song et al., 2020): BERT without segments, with relative position biases shared by all layers."""

from __future__ import annotations

from dataclasses import replace

from quire.engine.architecture import EncoderSpec, EncoderWeightNames
from quire.engine.families.base import EncoderFamily, ModelConfig
from quire.engine.families.roberta import build_roberta_spec

_WEIGHT_NAMES = EncoderWeightNames(
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


def _build_mpnet_spec(config: ModelConfig) -> EncoderSpec:
    return replace(
        build_roberta_spec(config),
        names=_WEIGHT_NAMES,
        first_position=2,
        segments=0,
        num_buckets=config.raw.get("relative_attention_num_buckets") or 32,
    )


MPNET = EncoderFamily(
    model_types=("mpnet",),
    defaults={"max_position_embeddings": 512},
    build_spec=_build_mpnet_spec,
)
