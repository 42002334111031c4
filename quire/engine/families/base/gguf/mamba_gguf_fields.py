from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.families.base.gguf.gguf_format import GGUFMetadata

MAMBA_GGUF_MODULES: Mapping[str, str] = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_x": "mamba.x_proj",
    "ssm_dt": "mamba.dt_proj",
    "ssm_dt_norm": "mamba.dt_layernorm",
    "ssm_b_norm": "mamba.b_layernorm",
    "ssm_c_norm": "mamba.c_layernorm",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
MAMBA_GGUF_TENSORS: Mapping[str, str] = {"ssm_a": "mamba.A_log", "ssm_d": "mamba.D"}
MAMBA2_GGUF_TENSORS: Mapping[str, str] = {
    **MAMBA_GGUF_TENSORS,
    "ssm_dt.bias": "mamba.dt_bias",
    "ffn_norm": "post_attention_layernorm.weight",
}
_ASSUMED_CONTEXT = 131_072
"""For models without a limit, whose files say _UNLIMITED_CONTEXT tokens."""
_UNLIMITED_CONTEXT = 2**20


def read_mamba_fields(metadata: GGUFMetadata) -> dict[str, Any]:
    sizes = {"mamba_d_ssm": metadata.integer("ssm.inner_size"), "mamba_dt_rank": metadata.integer("ssm.time_step_rank")}
    return _read_common_fields(metadata) | sizes


def read_mamba2_fields(metadata: GGUFMetadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    inner, heads = metadata.integer("ssm.inner_size"), metadata.integer("ssm.time_step_rank")
    return _read_common_fields(metadata) | {
        "mamba_n_heads": heads,
        "mamba_d_ssm": inner,
        "mamba_d_head": inner // heads if inner and heads else None,
        "mamba_n_groups": metadata.integer("ssm.group_count"),
    }


def _read_common_fields(metadata: GGUFMetadata) -> dict[str, Any]:
    is_biased, context = metadata.any_layer_has_tensor("ssm_in.bias"), metadata.integer("context_length")
    return {
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_conv_bias": metadata.any_layer_has_tensor("ssm_conv1d.bias"),
        "mamba_proj_bias": is_biased,
        "use_bias": is_biased,
        "max_position_embeddings": _ASSUMED_CONTEXT if context == _UNLIMITED_CONTEXT else context,
    }
