from collections.abc import Callable, Mapping
from typing import Any

from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.recurrent import Mamba2LayerSpec
from quire.engine.common.errors import ModelError
from quire.engine.families.base.config_fields import read_required_sizes
from quire.engine.families.base.layer_types import fill_layer_types
from quire.engine.families.base.model_config import ModelConfig

MAMBA2_FIELD_NAMES = {
    "conv_kernel": "mamba_d_conv",
    "n_groups": "mamba_n_groups",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
    "layer_norm_epsilon": "rms_norm_eps",
}
MAMBA2_DEFAULTS: Mapping[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
MAMBA2_PROJECTIONS = tuple(f"mamba.in_proj_{name}" for name in ("z", "x", "b", "c", "dt"))
"""Rows of in_proj: z and x (heads * head size each), b and c (groups * state size each), dt (heads)."""
_LEGACY_LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
_SIZE_FIELDS = ("mamba_n_groups", "mamba_n_heads", "mamba_d_state", "mamba_d_head", "mamba_d_conv")


def mamba2_spec(config: ModelConfig, norm: NormSpec, **fields: Any) -> Mamba2LayerSpec:
    """Raises ModelError."""
    raw = config.raw
    groups, heads, key, value, width = read_required_sizes(config, _SIZE_FIELDS, "state space")
    if heads % groups:
        raise ModelError(f"model: config.json: mamba_n_groups: {groups} do not divide {heads} heads")
    if key % 2:
        raise ModelError(f"model: config.json: mamba_d_state: expected an even number, got {key}")
    if value % 16:
        raise ModelError(f"model: config.json: mamba_d_head: expected a multiple of 16, got {value}")
    if (activation := raw.get("mamba_hidden_act")) not in (None, "silu", "swish"):
        raise ModelError(f"model: mamba_hidden_act {activation!r} is not supported")
    least, most = raw.get("time_step_limit") or (0.0, float("inf"))
    bias = bool(raw.get("mamba_proj_bias"))
    defaults: dict[str, Any] = {"bias": bias, "out_bias": bias, "dt_limits": (least, most)}
    defaults |= {"result_eps": config.norm_eps, "conv_bias": raw.get("mamba_conv_bias") is not False}
    return Mamba2LayerSpec(heads, key, value, width, norm, groups, **(defaults | fields))


def fill_hybrid_layer_types(fields: dict[str, Any], kind_of: Callable[[int], str]) -> None:
    """Renames legacy layer types. `kind_of` returns a layer's default type."""
    kinds = fields.get("layer_types")
    if isinstance(kinds, list) and kinds:
        fields["layer_types"] = [
            _LEGACY_LAYER_TYPES.get(each, each) if isinstance(each, str) else each for each in kinds
        ]
    else:
        fill_layer_types(fields, kind_of)


def fill_mamba2_head_dim(fields: dict[str, Any], *, inner_size: Any = None) -> None:
    """`inner_size` counts all heads' elements, by default mamba_expand times the hidden size."""
    heads, hidden, times = (fields.get(name) for name in ("mamba_n_heads", "hidden_size", "mamba_expand"))
    if fields.get("mamba_d_head") in (None, "auto") and isinstance(heads, int) and heads > 0:
        if isinstance(inner_size, int):
            fields["mamba_d_head"] = inner_size // heads
        elif isinstance(hidden, int) and isinstance(times, int):
            fields["mamba_d_head"] = times * hidden // heads
    if isinstance(limits := fields.get("time_step_limit"), list):
        fields["time_step_limit"] = [_parse_infinity(each) for each in limits]


def check_mamba2_width(config: ModelConfig) -> None:
    """Raises ModelError if the width is not heads times head size."""
    raw, times = config.raw, config.raw.get("mamba_expand")
    heads, size = raw.get("mamba_n_heads"), raw.get("mamba_d_head")
    if times is None or not isinstance(heads, int) or not isinstance(size, int):
        return
    inner_size = raw.get("mamba_d_ssm")
    name, width = ("mamba_d_ssm", inner_size) if inner_size else ("mamba_expand", times * config.hidden_size)
    if heads * size != width:
        raise ModelError(
            f"model: config.json: mamba_d_head: {heads} heads of {size} are {heads * size} numbers, where {name} "
            f"says {width}"
        )


def _parse_infinity(value: Any) -> Any:
    """JSON lacks these numbers. transformers writes {"__float__": ...}."""
    written = value.get("__float__") if isinstance(value, Mapping) else None
    return float(written) if written in ("Infinity", "-Infinity", "NaN") else value
