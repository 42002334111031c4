"""Text models of CLIP (Radford et al., 2021) and SigLIP (Zhai et al., 2023): a text's vector is a projection of its
last token's hidden state. CLIP's attention is causal. SigLIP pads texts to a fixed length.
"""

from __future__ import annotations

from typing import Any

from quire.engine.architecture import EncoderSpec, EncoderWeightNames, HeadLayerSpec, parse_encoder_activation
from quire.engine.families.base import EncoderFamily, ModelConfig, base_encoder_spec

_WEIGHT_NAMES = EncoderWeightNames(
    word_embeddings="embeddings.token_embedding",
    position_embeddings="embeddings.position_embedding",
    layer_template="encoder.layers.{}",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    attention_norm="layer_norm1",
    up=("mlp.fc1",),
    down="mlp.fc2",
    mlp_norm="layer_norm2",
    final_norm="final_layer_norm",
)
_UNUSED_PREFIXES = ("logit_scale", "logit_bias", "embeddings.position_ids", "vision_model.", "visual_projection.")


def _build_clip_spec(config: ModelConfig) -> EncoderSpec:
    head = HeadLayerSpec("text_projection", config.hidden_size, _clip_embedding_size(config), bias=False)
    return _build_text_encoder_spec(config, head, eps=1e-5, activation="quick_gelu", causal=True)


def _build_siglip_spec(config: ModelConfig) -> EncoderSpec:
    head = HeadLayerSpec("head", config.hidden_size, _siglip_embedding_size(config))
    return _build_text_encoder_spec(config, head, eps=1e-6, activation="gelu_pytorch_tanh", pads_prompts=True)


def _build_text_encoder_spec(
    config: ModelConfig, head: HeadLayerSpec, *, eps: float, activation: str, **fields: Any
) -> EncoderSpec:
    return base_encoder_spec(
        config,
        names=_WEIGHT_NAMES,
        classifier=lambda hidden, labels: [],
        eps=config.raw.get("layer_norm_eps") or eps,
        activation=parse_encoder_activation(config.raw.get("hidden_act") or activation),
        positions=config.max_position,
        pre_norm=True,
        has_first_layer_norm=True,
        projection=(head,),
        unused_prefixes=_UNUSED_PREFIXES,
        **fields,
    )


def _clip_embedding_size(config: ModelConfig) -> int:
    return config.raw.get("projection_dim") or 512


def _siglip_embedding_size(config: ModelConfig) -> int:
    return config.raw.get("projection_size") or config.hidden_size


CLIP = EncoderFamily(
    model_types=("clip_text_model",),
    defaults={"max_position_embeddings": 77},
    multimodal_text_defaults={
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "vocab_size": 49408,
        "max_position_embeddings": 77,
    },
    build_spec=_build_clip_spec,
    embedding_size=_clip_embedding_size,
    outer_fields=("projection_dim",),
)
SIGLIP = EncoderFamily(
    model_types=("siglip_text_model",),
    defaults={"max_position_embeddings": 64},
    multimodal_text_defaults={
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 32000,
        "max_position_embeddings": 64,
    },
    build_spec=_build_siglip_spec,
    embedding_size=_siglip_embedding_size,
)
