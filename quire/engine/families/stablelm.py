"""StableLM (Stability AI, 2023): Llama with LayerNorms, and RoPE on a quarter of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.families.base import DecoderFamily, GGUFFormat, GGUFMetadata, flag_reader, layer_norm_reader


def _read_stablelm_gguf_fields(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "qk_layernorm": metadata.has_tensor("blk.0.attn_q_norm.weight"),
        "use_parallel_residual": not metadata.has_tensor("blk.0.ffn_norm.weight"),
    }


STABLELM = DecoderFamily(
    model_types=("stablelm",),
    field_names={"layer_norm_eps": "rms_norm_eps"},
    defaults={"rms_norm_eps": 1e-05, "partial_rotary_factor": 0.25, "max_position_embeddings": 4096},
    has_partial_rotary=True,
    unsupported_fields={"qk_layernorm": "of a 'stablelm' is not supported"},
    norm=layer_norm_reader(),
    attention={"qkv_bias": flag_reader("use_qkv_bias")},
    mlp={"parallel": flag_reader("use_parallel_residual"), "shares_norm": flag_reader("use_parallel_residual")},
    gguf=GGUFFormat(
        architectures=("stablelm",),
        read_fields=_read_stablelm_gguf_fields,
    ),
)
