"""CWM (Meta FAIR, 2025): Llama with sliding windows in three of four layers."""

from typing import Any

from quire.engine.families.base import fill_layer_types, sliding_windows
from quire.engine.families.llama import LLAMA


def _fill_cwm_fields(fields: dict[str, Any]) -> None:
    fill_layer_types(fields, lambda layer: "sliding_attention" if layer % 4 else "full_attention")


CWM = LLAMA.derive(
    "cwm",
    defaults={
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "sliding_window": 8192,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    missing_defaults={"num_key_value_heads": 8},
    fill_derived_fields=_fill_cwm_fields,
    attention={"window": sliding_windows, "qkv_bias": False, "out_bias": False},
)
