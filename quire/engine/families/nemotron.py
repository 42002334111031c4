"""Nemotron-4 and Minitron (Nvidia, 2024): norm weights stored as offsets from 1, squared ReLU."""

from __future__ import annotations

from quire.engine.families.base import (
    GGUFFormat,
    attention_bias_readers,
    flag_reader,
    layer_norm_family,
    layer_norm_reader,
)

NEMOTRON = layer_norm_family(
    model_types=("nemotron",),
    field_names={"norm_eps": "rms_norm_eps"},
    defaults={
        "rms_norm_eps": 1e-05,
        "hidden_act": "relu2",
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 4096,
    },
    has_partial_rotary=True,
    bias=flag_reader("mlp_bias"),
    norm=layer_norm_reader(offset=1.0),
    attention=attention_bias_readers("attention_bias"),
    gguf=GGUFFormat(
        architectures=("nemotron",),
    ),
)
