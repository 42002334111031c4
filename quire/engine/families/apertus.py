"""Apertus (Swiss AI, 2025): an ungated MLP with xIELU, with learned parameters per layer."""

from __future__ import annotations

from quire.engine.families.base import DecoderFamily, WeightNames, attention_bias_readers

APERTUS = DecoderFamily(
    model_types=("apertus",),
    defaults={
        "rms_norm_eps": 1e-05,
        "hidden_act": "xielu",
        "rope_theta": 12_000_000.0,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 12_000_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        "max_position_embeddings": 65536,
    },
    attention={"qk_norm": "heads", **attention_bias_readers("attention_bias")},
    mlp={"gated": False, "activation": "xielu"},
    weight_names=WeightNames(
        layer_modules={"attention_layernorm": "input_layernorm", "feedforward_layernorm": "post_attention_layernorm"},
        unused_tensors=("mlp.act_fn.eps",),
    ),
)
