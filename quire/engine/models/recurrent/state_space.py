"""What config.json says of selective state spaces, in the names that all families have after
engine/checkpoint/alike/state_spaces.py."""

from typing import Any

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.norm import NormSpec
from quire.engine.layers.recurrent.state_space import StateSpaceSpec
from quire.engine.models.values import sizes

_SIZES = ("mamba_n_groups", "mamba_n_heads", "mamba_d_state", "mamba_d_head", "mamba_d_conv")


def state_space(config: ModelConfig, norm: NormSpec, **rules: Any) -> StateSpaceSpec:
    """`rules`: fields of StateSpaceSpec. Raises ModelError."""
    raw = config.raw
    groups, heads, key, value, width = sizes(config, _SIZES, "state space")
    if heads % groups:
        raise ModelError(f"model: config.json: mamba_n_groups: {groups} do not divide {heads} heads")
    if key % 2:
        raise ModelError(f"model: config.json: mamba_d_state: expected an even number, got {key}")
    if value % 16:
        raise ModelError(f"model: config.json: mamba_d_head: expected a multiple of 16, got {value}")
    if (named := raw.get("mamba_hidden_act")) not in (None, "silu", "swish"):
        raise ModelError(f"model: mamba_hidden_act {named!r} is not supported")
    least, most = raw.get("time_step_limit") or (0.0, float("inf"))
    bias = bool(raw.get("mamba_proj_bias"))
    chosen: dict[str, Any] = {"bias": bias, "out_bias": bias, "limits": (least, most)}
    chosen |= {"result_eps": config.norm_eps, "conv_bias": raw.get("mamba_conv_bias") is not False}
    return StateSpaceSpec(heads, key, value, width, norm, groups, **(chosen | rules))
