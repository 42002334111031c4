"""What config.json says of selective scans, in the names that all families have after
engine/checkpoint/alike/selective_scans.py."""

from typing import Any

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.norm import NormSpec
from quire.engine.layers.recurrent.selective_scan import SelectiveScanSpec
from quire.engine.models.values import sizes

_SIZES = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_dt_rank", "mamba_d_conv")


def selective_scan(config: ModelConfig, norm: NormSpec, **rules: Any) -> SelectiveScanSpec:
    """`rules`: fields of SelectiveScanSpec. Raises ModelError."""
    raw = config.raw
    heads, value, key, rank, width = sizes(config, _SIZES, "selective scan")
    if (inner := raw.get("mamba_d_ssm")) != heads * value:
        raise ModelError(f"model: config.json: mamba_d_ssm: expected a multiple of 16 channels, got {inner}")
    if key % 2:
        raise ModelError(f"model: config.json: mamba_d_state: expected an even number, got {key}")
    biases = {"bias": bool(raw.get("mamba_proj_bias")), "conv_bias": raw.get("mamba_conv_bias") is not False}
    return SelectiveScanSpec(heads, key, value, width, norm, rank, **(biases | rules))
