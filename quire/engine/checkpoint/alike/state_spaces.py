"""What a config.json says of selective state spaces (Mamba 2), by the names that Bamba gave them: those of the other
families, what they leave out, and which layers have what. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.checkpoint.fields import MAX_LAYERS

_NAMES = {
    "conv_kernel": "mamba_d_conv",
    "n_groups": "mamba_n_groups",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
    "layer_norm_epsilon": "rms_norm_eps",
}
OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    "bamba": {"layers_block_type": "layer_types"},
    "falcon_h1": {"layers_block_type": "layer_types"},
    "granitemoehybrid": {"layers_block_type": "layer_types"},
    "mamba2": {
        **_NAMES,
        "num_heads": "mamba_n_heads",
        "head_dim": "mamba_d_head",
        "state_size": "mamba_d_state",
        "expand": "mamba_expand",
        "tie_embeddings": "tie_word_embeddings",
    },
    "nemotron_h": {
        **_NAMES,
        "mamba_dt_min": "time_step_min",
        "layers_block_type": "layer_types",
        "mamba_num_heads": "mamba_n_heads",
        "mamba_head_dim": "mamba_d_head",
        "ssm_state_size": "mamba_d_state",
        "mlp_hidden_act": "hidden_act",
        "n_routed_experts": "num_local_experts",
        "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
    },
    "zamba2": {
        "layers_block_type": "layer_types",
        "n_mamba_heads": "mamba_n_heads",
        "mamba_ngroups": "mamba_n_groups",
        "add_bias_linear": "mamba_proj_bias",
        "attention_head_dim": "head_dim",
    },
}
"""By model_type, as OTHER_NAMES of fields.py has it."""
_SPACE = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
_BAMBA = {**_SPACE, "rms_norm_eps": 1e-5, "num_key_value_heads": 8}
_EIGHT_GROUPS = {**_SPACE, "mamba_n_groups": 8, "mamba_d_head": 64, "mamba_d_state": 128, "rms_norm_eps": 1e-5}
LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "bamba": {**_BAMBA, "partial_rotary_factor": 0.5, "max_position_embeddings": 262_144},
    "falcon_h1": {**_BAMBA, "mamba_d_ssm": 1024, "mamba_norm_before_gate": True, "max_position_embeddings": 8192},
    "granitemoehybrid": {**_SPACE, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024},
    "mamba2": {**_EIGHT_GROUPS, "max_position_embeddings": 131_072},  # it has none: what is a long context
    "nemotron_h": {
        **_EIGHT_GROUPS,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "intermediate_size": 21504,
        "hidden_act": "relu2",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "shared_expert_intermediate_size": 7688,
        "norm_topk_prob": True,
    },
    "zamba2": {
        **_SPACE,
        "mamba_n_heads": 8,
        "mamba_d_state": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "vocab_size": 32_000,
        "hidden_size": 2560,
        "num_hidden_layers": 54,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}
"""The same of LEFT_OUT."""
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Of hybrid_override_pattern, as Nemotron-H was published."""
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}


def complete(found: dict[str, Any]) -> None:
    """The sizes that follow from others, and layer_types where other fields say them."""
    kind, layers = found["model_type"], found.get("num_hidden_layers")
    pattern = found.get("hybrid_override_pattern")
    if kind == "nemotron_h" and not found.get("layer_types") and isinstance(pattern, str):
        found["layer_types"] = [_LETTERS.get(letter, letter) for letter in pattern[: MAX_LAYERS + 1]]
    if kind == "nemotron_h" and not found.get("layer_types"):
        found["layer_types"] = ["linear_attention", "moe", "full_attention", "mlp"]
    if kind == "nemotron_h":
        _complete_mtp(found)
    types = found.get("layer_types")
    if kind == "nemotron_h" and isinstance(types, list) and 1 <= len(types) <= MAX_LAYERS:
        found["num_hidden_layers"] = layers = len(types)  # whatever config.json says
    if isinstance(types, list) and types:
        found["layer_types"] = [_OLDER.get(each, each) if isinstance(each, str) else each for each in types]
        if kind == "nemotron_h" and "mlp" not in types and "moe" not in types:
            found["hidden_act"] = None  # of MLPs alone, and there is none
    elif isinstance(layers, int) and 1 <= layers <= MAX_LAYERS:
        found["layer_types"] = _layer_types(kind, found, layers)
    _complete_sizes(kind, found)


def _complete_mtp(found: dict[str, Any]) -> None:
    """What the layers that guess tokens are, by the names of others."""
    kinds, pattern = found.get("mtp_layers_block_type"), found.get("mtp_hybrid_override_pattern")
    if not kinds and isinstance(pattern, str):
        kinds = [_LETTERS.get(letter, letter) for letter in pattern[:MAX_LAYERS]]
    kinds = kinds or ["full_attention", "moe"]
    if isinstance(kinds, list):
        found["mtp_layers_block_type"] = [_OLDER.get(each, each) if isinstance(each, str) else each for each in kinds]


def _layer_types(kind: str, found: Mapping[str, Any], layers: int) -> list[str]:
    if kind == "falcon_h1":
        return ["hybrid"] * layers
    if kind == "zamba2":
        hybrid = [*range(6, 48, 6), 47, 51]
        return ["hybrid" if layer in hybrid else "linear_attention" for layer in range(layers)]
    attending = found.get("attn_layer_indices") if kind == "bamba" else ()
    attending = attending if isinstance(attending, list) else ()
    return ["full_attention" if layer in attending else "linear_attention" for layer in range(layers)]


def _complete_sizes(kind: str, found: dict[str, Any]) -> None:
    heads, hidden = found.get("mamba_n_heads"), found.get("hidden_size")
    times, own = found.get("mamba_expand"), found.get("mamba_d_ssm") if kind == "falcon_h1" else None
    if found.get("mamba_d_head") in (None, "auto") and isinstance(heads, int) and heads > 0:
        if isinstance(own, int):
            found["mamba_d_head"] = own // heads
        elif isinstance(hidden, int) and isinstance(times, int):
            found["mamba_d_head"] = times * hidden // heads
    if kind == "zamba2":
        _complete_zamba2(found)
    if isinstance(limits := found.get("time_step_limit"), list):
        found["time_step_limit"] = [_number(each) for each in limits]
    if kind == "mamba2":  # which has neither attention nor an MLP
        found |= {"num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": hidden}
        found["head_dim"] = found.get("mamba_d_head")


def _complete_zamba2(found: dict[str, Any]) -> None:
    """What follows from the size of hidden states, of which attention reads twice as much. config.json may have another
    size of attention's heads, which transformers takes."""
    heads, hidden, spaces = (found.get(name) for name in ("num_attention_heads", "hidden_size", "mamba_n_heads"))
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        found["head_dim"] = found.get("head_dim") or 2 * hidden // heads
        found["intermediate_size"] = found.get("intermediate_size") or 4 * hidden
    times = found.get("mamba_expand")
    if isinstance(hidden, int) and isinstance(times, int) and isinstance(spaces, int) and spaces > 0:
        found["mamba_d_head"] = times * hidden // spaces
    if found.get("use_long_context"):
        found["max_position_embeddings"] = 16_384


def _number(given: Any) -> Any:
    """Of a number that JSON does not have, as transformers writes it."""
    written = given.get("__float__") if isinstance(given, Mapping) else None
    return float(written) if written in ("Infinity", "-Infinity", "NaN") else given
