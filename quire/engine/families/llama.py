"""Llama 2 and 3 (Touvron et al., 2023; Dubey et al., 2024), and many models of that shape."""

from __future__ import annotations

from quire.engine.families.base import DecoderFamily, GGUFFormat, attention_bias_readers, flag_reader

LLAMA = DecoderFamily(
    model_types=("llama",),
    multimodal_text_defaults={
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "intermediate_size": 11008,
    },
    attention=attention_bias_readers("attention_bias"),
    mlp={"bias": flag_reader("mlp_bias")},
    gguf=GGUFFormat(
        architectures=("llama",),
        matches=lambda metadata: not metadata.integer("expert_count"),
        permutes_queries_and_keys=True,
    ),
)
