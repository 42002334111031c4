"""What config.json says of selective state spaces, in the names that all families have after
engine/checkpoint/alike/state_spaces.py."""

from typing import Any

from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.recurrent import Mamba2LayerSpec
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.families.config_fields import read_required_sizes

_SIZE_FIELDS = ("mamba_n_groups", "mamba_n_heads", "mamba_d_state", "mamba_d_head", "mamba_d_conv")


def mamba2_spec(config: ModelConfig, norm: NormSpec, **fields: Any) -> Mamba2LayerSpec:
    """`fields`: fields of Mamba2LayerSpec. Raises ModelError."""
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
