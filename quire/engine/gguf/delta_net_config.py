"""What GGUF files say of models with gated delta nets: Qwen3.5, dense and with experts, and Qwen3-Next."""

from __future__ import annotations

from typing import Any

from quire.engine.gguf.header import GGUFHeader

MODEL_TYPES = {"qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text", "qwen3next": "qwen3_next"}
"""general.architecture to config.json's model_type."""
MOE_ARCHS = ("qwen35moe", "qwen3next")
TILED_VALUE_HEAD_TYPES = ("qwen3_5_moe_text", "qwen3_5_text")
"""Families whose files have the value heads of all key heads in turns: the first of each key head, then the second."""
LAYER_TENSORS = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_out": "linear_attn.out_proj",
    "ssm_norm": "linear_attn.norm",
    "ssm_conv1d": "linear_attn.conv1d",
    "post_attention_norm": "post_attention_layernorm",
}
"""Names of a layer's tensors, as engine/gguf/tensor_names.py has them."""
UNSUFFIXED_LAYER_TENSORS = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
"""Whole names of a layer's tensors, with their endings."""


def delta_net_fields(header: GGUFHeader, arch: str) -> dict[str, Any]:
    """What config.json would have beside what every family has."""
    heads, inner = header.get_integer(f"{arch}.ssm.time_step_rank"), header.get_integer(f"{arch}.ssm.inner_size")
    config_fields = {
        "full_attention_interval": header.get_integer(f"{arch}.full_attention_interval") or 4,
        "linear_conv_kernel_dim": header.get_integer(f"{arch}.ssm.conv_kernel"),
        "linear_key_head_dim": header.get_integer(f"{arch}.ssm.state_size"),
        "linear_num_key_heads": header.get_integer(f"{arch}.ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads if inner and heads else None,
        "num_nextn_predict_layers": header.get_integer(f"{arch}.nextn_predict_layers"),
    }
    if arch not in MOE_ARCHS:
        return config_fields
    return config_fields | {
        "moe_intermediate_size": header.get_integer(f"{arch}.expert_feed_forward_length"),
        "shared_expert_intermediate_size": header.get_integer(f"{arch}.expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
    }
