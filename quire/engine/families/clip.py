"""The text parts of CLIP (Radford et al., 2021) and SigLIP (Zhai et al., 2023), beside which an image has a vector
too."""

from __future__ import annotations

from quire.engine.families.base import EncoderFamily

CLIP = EncoderFamily(
    model_types=("clip_text_model",),
    defaults={"max_position_embeddings": 77},
    multimodal_model_types=("clip",),
    multimodal_text_defaults={
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "vocab_size": 49408,
        "max_position_embeddings": 77,
    },
    module="clip",
    is_bert_like=True,
    vector_size=lambda config: config.raw.get("projection_dim") or 512,
    outer_fields=("projection_dim",),
)
SIGLIP = EncoderFamily(
    model_types=("siglip_text_model",),
    defaults={"max_position_embeddings": 64},
    multimodal_model_types=("siglip",),
    multimodal_text_defaults={
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 32000,
        "max_position_embeddings": 64,
    },
    module="clip",
    is_bert_like=True,
    vector_size=lambda config: config.raw.get("projection_size") or config.hidden_size,
)
