"""What config.json says of selective scans, in the names that all families have after
engine/checkpoint/alike/selective_scans.py."""

from typing import Any

from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.recurrent import MambaLayerSpec
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.families.config_fields import read_required_sizes

_SIZE_FIELDS = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_dt_rank", "mamba_d_conv")


def mamba_spec(config: ModelConfig, norm: NormSpec, **fields: Any) -> MambaLayerSpec:
    """`fields`: fields of MambaLayerSpec. Raises ModelError."""
    raw = config.raw
    heads, value_dim, key_dim, rank, width = read_required_sizes(config, _SIZE_FIELDS, "selective scan")
    if (inner := raw.get("mamba_d_ssm")) != heads * value_dim:
        raise ModelError(f"model: config.json: mamba_d_ssm: expected a multiple of 16 channels, got {inner}")
    if key_dim % 2:
        raise ModelError(f"model: config.json: mamba_d_state: expected an even number, got {key_dim}")
    biases = {"bias": bool(raw.get("mamba_proj_bias")), "conv_bias": raw.get("mamba_conv_bias") is not False}
    return MambaLayerSpec(heads, key_dim, value_dim, width, norm, rank, **(biases | fields))
