"""What a config.json says of selective scans (Mamba), by the names that Bamba gave those of state spaces: those of the
families, what they leave out, and which layers have what. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.checkpoint.fields import MAX_LAYERS

_MAMBA = {
    "conv_kernel": "mamba_d_conv",
    "expand": "mamba_expand",
    "intermediate_size": "mamba_d_ssm",
    "layer_norm_epsilon": "rms_norm_eps",
    "state_size": "mamba_d_state",
    "time_step_rank": "mamba_dt_rank",
    "use_bias": "mamba_proj_bias",
    "use_conv_bias": "mamba_conv_bias",
}
OTHER_NAMES: Mapping[str, Mapping[str, str]] = {"falcon_mamba": _MAMBA, "mamba": _MAMBA}
"""By model_type, as OTHER_NAMES of fields.py has it."""
_SCAN = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": "auto", "mamba_conv_bias": True}
_ALONE = {**_SCAN, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "max_position_embeddings": 131_072}
LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "falcon_mamba": {**_ALONE, "mixer_rms_eps": 1e-6},
    "jamba": {
        **_SCAN,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262_144,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "mamba": _ALONE,
}
"""The same of LEFT_OUT. Those without attention have no longest context: what is a long one stands here."""
_CHANNELS = (64, 32, 16)
"""Of which so many are computed together, as a head: the first of these that divides them."""


def complete(found: dict[str, Any]) -> None:
    """The sizes that follow from others, and which layers have attention and experts, where other fields say it."""
    kind = found["model_type"]
    layers = found.get("num_hidden_layers")
    hidden = found.get("hidden_size")
    times, inner = found.get("mamba_expand"), None if kind == "jamba" else found.get("mamba_d_ssm")
    if inner is None and isinstance(hidden, int) and isinstance(times, int):
        inner = times * hidden
    if isinstance(inner, int):
        found["mamba_d_ssm"] = inner
        found["mamba_d_head"] = value = next((size for size in _CHANNELS if inner % size == 0), _CHANNELS[-1])
        found["mamba_n_heads"] = heads = inner // value
        if kind != "jamba":  # which have neither attention nor an MLP
            found |= {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": value}
            found["intermediate_size"] = inner
    if found.get("mamba_dt_rank") == "auto" and isinstance(hidden, int):
        found["mamba_dt_rank"] = -(-hidden // 16)
    if not isinstance(layers, int) or not 1 <= layers <= MAX_LAYERS:
        return
    if kind != "jamba" or not found.get("layer_types"):
        attends = _every(found, "attn_layer", layers) if kind == "jamba" else [False] * layers
        found["layer_types"] = ["full_attention" if each else "linear_attention" for each in attends]
    if kind == "jamba" and not found.get("mlp_layer_types"):
        count = found.get("num_experts")
        has = _every(found, "expert_layer", layers) if isinstance(count, int) and count > 1 else [False] * layers
        found["mlp_layer_types"] = ["sparse" if each else "dense" for each in has]


def _every(found: Mapping[str, Any], what: str, layers: int) -> list[bool]:
    """Of which layers something is: one of so many, and which of them."""
    period, offset = found.get(f"{what}_period"), found.get(f"{what}_offset")
    return [isinstance(period, int) and period > 0 and layer % period == offset for layer in range(layers)]
