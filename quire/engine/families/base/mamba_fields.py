from collections.abc import Mapping
from typing import Any

from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.recurrent import MambaLayerSpec
from quire.engine.common.errors import ModelError
from quire.engine.families.base.config_fields import read_required_sizes
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.weight_names import LayerModules

MAMBA_FIELD_NAMES = {
    "conv_kernel": "mamba_d_conv",
    "expand": "mamba_expand",
    "intermediate_size": "mamba_d_ssm",
    "layer_norm_epsilon": "rms_norm_eps",
    "state_size": "mamba_d_state",
    "time_step_rank": "mamba_dt_rank",
    "use_bias": "mamba_proj_bias",
    "use_conv_bias": "mamba_conv_bias",
}
MAMBA_DEFAULTS: Mapping[str, Any] = {
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": "auto",
    "mamba_conv_bias": True,
}
MAMBA_MODULES: LayerModules = {
    "mamba.in_proj": ("mamba.in_proj_x", "mamba.in_proj_z"),
    "mamba.x_proj": ("mamba.x_proj_dt", "mamba.x_proj_b", "mamba.x_proj_c"),
}
_HEAD_SIZES = (64, 32, 16)
"""Channels per head. The first that divides the number of channels is used."""
_SIZE_FIELDS = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_dt_rank", "mamba_d_conv")


def mamba_spec(config: ModelConfig, norm: NormSpec, **fields: Any) -> MambaLayerSpec:
    """Raises ModelError."""
    raw = config.raw
    heads, value_dim, key_dim, rank, width = read_required_sizes(config, _SIZE_FIELDS, "selective scan")
    if (inner := raw.get("mamba_d_ssm")) != heads * value_dim:
        raise ModelError(f"model: config.json: mamba_d_ssm: expected a multiple of 16 channels, got {inner}")
    if key_dim % 2:
        raise ModelError(f"model: config.json: mamba_d_state: expected an even number, got {key_dim}")
    biases = {"bias": bool(raw.get("mamba_proj_bias")), "conv_bias": raw.get("mamba_conv_bias") is not False}
    return MambaLayerSpec(heads, key_dim, value_dim, width, norm, rank, **(biases | fields))


def fill_mamba_sizes(fields: dict[str, Any], *, inner_size: Any = None) -> None:
    """`inner_size` is the number of channels, by default mamba_expand times the hidden size."""
    hidden, times = fields.get("hidden_size"), fields.get("mamba_expand")
    if inner_size is None and isinstance(hidden, int) and isinstance(times, int):
        inner_size = times * hidden
    if isinstance(inner_size, int):
        fields["mamba_d_ssm"] = inner_size
        head_size = next((size for size in _HEAD_SIZES if inner_size % size == 0), _HEAD_SIZES[-1])
        fields |= {"mamba_d_head": head_size, "mamba_n_heads": inner_size // head_size}
    if fields.get("mamba_dt_rank") == "auto" and isinstance(hidden, int):
        fields["mamba_dt_rank"] = -(-hidden // 16)
