"""What GGUF files say of models with state spaces (Mamba 2) and with selective scans (Mamba)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.errors import ModelError
from quire.engine.gguf.header import Header

FAMILIES = {
    "falcon-h1": "falcon_h1",
    "granitehybrid": "granitemoehybrid",
    "jamba": "jamba",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h",
}
"""general.architecture to config.json's model_type. Falcon Mamba's files call themselves mamba."""
WITH_EXPERTS, MAY_HAVE_EXPERTS = ("nemotron_h_moe",), ("granitehybrid", "jamba")
INSIDE = {
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
"""Names of a layer's tensors, as engine/gguf/names.py has them."""
_SCANS = ("falcon_mamba", "jamba", "mamba")
"""Model types with selective scans."""
_BARE = {"ssm_a": "mamba.A_log", "ssm_d": "mamba.D"}
_PLAIN = _BARE | {"ssm_dt.bias": "mamba.dt_bias", "ffn_norm": "post_attention_layernorm.weight"}
"""The same of state spaces; the second norm of Falcon-H1's layers is called ffn_norm, without an ending."""
_LONG = 131_072
"""A long context, where the file names a million tokens because nothing limits them."""
_UNLIMITED = 2**20


def bare(model_type: str) -> Mapping[str, str]:
    """Whole names of a layer's tensors, with their endings, as delta_nets.BARE has them."""
    if model_type in _SCANS:
        return _BARE
    return _PLAIN if model_type in FAMILIES.values() else {}


def family(header: Header, arch: str) -> str:
    """The model_type."""
    return "falcon_mamba" if arch == "mamba" and header.flag("mamba.ssm.dt_b_c_rms") else FAMILIES[arch]


def fields(header: Header, arch: str) -> dict[str, Any]:
    """What config.json would have beside, or instead of, what every family has. Raises ModelError."""
    inner, rank = header.integer(f"{arch}.ssm.inner_size"), header.integer(f"{arch}.ssm.time_step_rank")
    kind, width = FAMILIES[arch], header.integer(f"{arch}.ssm.conv_kernel")
    found: dict[str, Any] = {"mamba_d_conv": width, "mamba_d_state": header.integer(f"{arch}.ssm.state_size")}
    found |= {
        "mamba_conv_bias": _has(header, "ssm_conv1d.bias"),
        "mamba_proj_bias": (biased := _has(header, "ssm_in.bias")),
        "use_bias": biased,
        "max_position_embeddings": _context(header, arch),
    }
    if kind in _SCANS:
        found |= {"mamba_d_ssm": inner, "mamba_dt_rank": rank}
        found |= {"intermediate_size": inner} if arch == "mamba" else _jamba(header, inner)
        return found
    found |= {"mamba_n_heads": rank, "mamba_d_ssm": inner, "mamba_d_head": inner // rank if inner and rank else None}
    found["mamba_n_groups"] = header.integer(f"{arch}.ssm.group_count")
    match arch:
        case "falcon-h1":  # whose factors are in its weights
            found |= {"mamba_rms_norm": _has(header, "ssm_norm.weight"), "mamba_norm_before_gate": False}
        case "granitehybrid":
            found |= _granite(header)
        case "nemotron_h" | "nemotron_h_moe":
            found |= _nemotron(header, arch)
    return found


def _has(header: Header, name: str) -> bool:
    return any(each.startswith("blk.") and each.endswith(f".{name}") for each in header.tensors)


def _context(header: Header, arch: str) -> int | None:
    given = header.integer(f"{arch}.context_length")
    return _LONG if given == _UNLIMITED else given


def _kinds(header: Header, arch: str) -> list[str]:
    """layer_types, by which layers have keys."""
    key = f"{arch}.attention.head_count_kv"
    if not isinstance(header.metadata.get(key), list):
        raise ModelError(f"model: {header.name}: {key}: expected a number for each layer")
    return ["full_attention" if each else "linear_attention" for each in header.integers(key)]


def _jamba(header: Header, inner: int | None) -> dict[str, Any]:
    kinds, hidden = _kinds(header, "jamba"), header.integer("jamba.embedding_length")
    has = [f"blk.{layer}.ffn_gate_inp.weight" in header.tensors for layer in range(len(kinds))]
    return {
        "mamba_expand": inner // hidden if inner and hidden else None,
        "layer_types": kinds,
        "mlp_layer_types": ["sparse" if each else "dense" for each in has],
    }


def _granite(header: Header) -> dict[str, Any]:
    arch = "granitehybrid"
    experts, wide = header.integer(f"{arch}.expert_count"), header.integer(f"{arch}.feed_forward_length")
    shared = header.integer(f"{arch}.expert_shared_feed_forward_length")
    return {
        "layer_types": _kinds(header, arch),
        "position_embedding_type": "rope" if header.flag(f"{arch}.rope.scaling.finetuned") else "nope",
        "num_local_experts": experts or 0,
        "intermediate_size": header.integer(f"{arch}.expert_feed_forward_length") or wide,
        "shared_intermediate_size": shared or (0 if experts else wide),
    }


def _nemotron(header: Header, arch: str) -> dict[str, Any]:
    key = f"{arch}.feed_forward_length"
    if not isinstance(header.metadata.get(key), list):
        raise ModelError(f"model: {header.name}: {key}: expected a number for each layer")
    other = "moe" if arch == "nemotron_h_moe" else "mlp"
    pairs = zip(_kinds(header, arch), header.integers(key), strict=False)
    found: dict[str, Any] = {"layer_types": [other if width else kind for kind, width in pairs]}
    if arch == "nemotron_h":
        return found
    groups = header.integer(f"{arch}.expert_group_count") or 1
    return found | {
        "moe_intermediate_size": header.integer(f"{arch}.expert_feed_forward_length"),
        "moe_latent_size": header.integer(f"{arch}.moe_latent_size"),
        "shared_expert_intermediate_size": header.integer(f"{arch}.expert_shared_feed_forward_length"),
        "norm_topk_prob": bool(header.flag(f"{arch}.expert_weights_norm")),
        "routed_scaling_factor": header.number(f"{arch}.expert_weights_scale") or None,
        "n_group": groups,
        "topk_group": header.integer(f"{arch}.expert_group_used_count") or groups,
        "num_nextn_predict_layers": header.integer(f"{arch}.nextn_predict_layers"),
    }
