"""What GGUF files say of models with state spaces (Mamba 2) and with selective scans (Mamba)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.errors import ModelError
from quire.engine.gguf.header import GGUFHeader

MODEL_TYPES = {
    "falcon-h1": "falcon_h1",
    "granitehybrid": "granitemoehybrid",
    "jamba": "jamba",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h",
}
"""general.architecture to config.json's model_type. Falcon Mamba's files call themselves mamba."""
MOE_ARCHS, OPTIONAL_MOE_ARCHS = ("nemotron_h_moe",), ("granitehybrid", "jamba")
LAYER_TENSORS = {
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
"""Names of a layer's tensors, as engine/gguf/tensor_names.py has them."""
_SELECTIVE_SCAN_TYPES = ("falcon_mamba", "jamba", "mamba")
"""Model types with selective scans."""
_MAMBA1_UNSUFFIXED_TENSORS = {"ssm_a": "mamba.A_log", "ssm_d": "mamba.D"}
_MAMBA2_UNSUFFIXED_TENSORS = _MAMBA1_UNSUFFIXED_TENSORS | {
    "ssm_dt.bias": "mamba.dt_bias",
    "ffn_norm": "post_attention_layernorm.weight",
}
"""The same of state spaces; the second norm of Falcon-H1's layers is called ffn_norm, without an ending."""
_ASSUMED_CONTEXT = 131_072
"""A long context, where the file names a million tokens because nothing limits them."""
_UNLIMITED_CONTEXT = 2**20


def unsuffixed_tensor_name_map(model_type: str) -> Mapping[str, str]:
    """Whole names of a layer's tensors, with their endings, as delta_net_config.UNSUFFIXED_LAYER_TENSORS has them."""
    if model_type in _SELECTIVE_SCAN_TYPES:
        return _MAMBA1_UNSUFFIXED_TENSORS
    return _MAMBA2_UNSUFFIXED_TENSORS if model_type in MODEL_TYPES.values() else {}


def mamba_model_type(header: GGUFHeader, arch: str) -> str:
    """The model_type."""
    return "falcon_mamba" if arch == "mamba" and header.get_bool("mamba.ssm.dt_b_c_rms") else MODEL_TYPES[arch]


def mamba_fields(header: GGUFHeader, arch: str) -> dict[str, Any]:
    """What config.json would have beside, or instead of, what every family has. Raises ModelError."""
    inner, rank = header.get_integer(f"{arch}.ssm.inner_size"), header.get_integer(f"{arch}.ssm.time_step_rank")
    kind, width = MODEL_TYPES[arch], header.get_integer(f"{arch}.ssm.conv_kernel")
    config_fields: dict[str, Any] = {
        "mamba_d_conv": width,
        "mamba_d_state": header.get_integer(f"{arch}.ssm.state_size"),
    }
    config_fields |= {
        "mamba_conv_bias": _any_layer_has_tensor(header, "ssm_conv1d.bias"),
        "mamba_proj_bias": (biased := _any_layer_has_tensor(header, "ssm_in.bias")),
        "use_bias": biased,
        "max_position_embeddings": _context_length(header, arch),
    }
    if kind in _SELECTIVE_SCAN_TYPES:
        config_fields |= {"mamba_d_ssm": inner, "mamba_dt_rank": rank}
        config_fields |= {"intermediate_size": inner} if arch == "mamba" else _jamba_fields(header, inner)
        return config_fields
    config_fields |= {
        "mamba_n_heads": rank,
        "mamba_d_ssm": inner,
        "mamba_d_head": inner // rank if inner and rank else None,
    }
    config_fields["mamba_n_groups"] = header.get_integer(f"{arch}.ssm.group_count")
    match arch:
        case "falcon-h1":  # whose factors are in its weights
            config_fields |= {
                "mamba_rms_norm": _any_layer_has_tensor(header, "ssm_norm.weight"),
                "mamba_norm_before_gate": False,
            }
        case "granitehybrid":
            config_fields |= _granite_fields(header)
        case "nemotron_h" | "nemotron_h_moe":
            config_fields |= _nemotron_fields(header, arch)
    return config_fields


def _any_layer_has_tensor(header: GGUFHeader, name: str) -> bool:
    return any(each.startswith("blk.") and each.endswith(f".{name}") for each in header.tensors)


def _context_length(header: GGUFHeader, arch: str) -> int | None:
    context_length = header.get_integer(f"{arch}.context_length")
    return _ASSUMED_CONTEXT if context_length == _UNLIMITED_CONTEXT else context_length


def _layer_types(header: GGUFHeader, arch: str) -> list[str]:
    """layer_types, by which layers have keys."""
    key = f"{arch}.attention.head_count_kv"
    if not isinstance(header.metadata.get(key), list):
        raise ModelError(f"model: {header.name}: {key}: expected a number for each layer")
    return ["full_attention" if each else "linear_attention" for each in header.get_integers(key)]


def _jamba_fields(header: GGUFHeader, inner: int | None) -> dict[str, Any]:
    kinds, hidden = _layer_types(header, "jamba"), header.get_integer("jamba.embedding_length")
    has = [f"blk.{layer}.ffn_gate_inp.weight" in header.tensors for layer in range(len(kinds))]
    return {
        "mamba_expand": inner // hidden if inner and hidden else None,
        "layer_types": kinds,
        "mlp_layer_types": ["sparse" if each else "dense" for each in has],
    }


def _granite_fields(header: GGUFHeader) -> dict[str, Any]:
    arch = "granitehybrid"
    experts, wide = header.get_integer(f"{arch}.expert_count"), header.get_integer(f"{arch}.feed_forward_length")
    shared = header.get_integer(f"{arch}.expert_shared_feed_forward_length")
    return {
        "layer_types": _layer_types(header, arch),
        "position_embedding_type": "rope" if header.get_bool(f"{arch}.rope.scaling.finetuned") else "nope",
        "num_local_experts": experts or 0,
        "intermediate_size": header.get_integer(f"{arch}.expert_feed_forward_length") or wide,
        "shared_intermediate_size": shared or (0 if experts else wide),
    }


def _nemotron_fields(header: GGUFHeader, arch: str) -> dict[str, Any]:
    key = f"{arch}.feed_forward_length"
    if not isinstance(header.metadata.get(key), list):
        raise ModelError(f"model: {header.name}: {key}: expected a number for each layer")
    other = "moe" if arch == "nemotron_h_moe" else "mlp"
    pairs = zip(_layer_types(header, arch), header.get_integers(key), strict=False)
    config_fields: dict[str, Any] = {"layer_types": [other if width else kind for kind, width in pairs]}
    if arch == "nemotron_h":
        return config_fields
    groups = header.get_integer(f"{arch}.expert_group_count") or 1
    return config_fields | {
        "moe_intermediate_size": header.get_integer(f"{arch}.expert_feed_forward_length"),
        "moe_latent_size": header.get_integer(f"{arch}.moe_latent_size"),
        "shared_expert_intermediate_size": header.get_integer(f"{arch}.expert_shared_feed_forward_length"),
        "norm_topk_prob": bool(header.get_bool(f"{arch}.expert_weights_norm")),
        "routed_scaling_factor": header.get_float(f"{arch}.expert_weights_scale") or None,
        "n_group": groups,
        "topk_group": header.get_integer(f"{arch}.expert_group_used_count") or groups,
        "num_nextn_predict_layers": header.get_integer(f"{arch}.nextn_predict_layers"),
    }
