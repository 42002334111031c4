"""The kinds of what layers keep of sequences, with their numbers and bytes, and which layer keeps what. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.architecture.kv_cache_spec import MatrixState, PagedColumnState
from quire.engine.checkpoint.families import DELTA_NETS, SELECTIVE_SCANS, STATE_SPACES, STATES


def state_of(text: Mapping[str, Any], hidden: int) -> PagedColumnState | MatrixState | None:
    """What a convolution, a delta net, a state space or a selective scan keeps, in families that have some."""
    kind = str(text.get("model_type"))
    if kind in DELTA_NETS:
        key_heads, heads = int(text.get("linear_num_key_heads") or 16), int(text.get("linear_num_value_heads") or 32)
        key, value = int(text.get("linear_key_head_dim") or 128), int(text.get("linear_value_head_dim") or 128)
        columns = max(int(text.get("linear_conv_kernel_dim") or 4), 2) - 1
        return MatrixState(2 * key_heads * key + heads * value, columns, heads, key, value, 2 * heads)
    if kind in (*STATE_SPACES, *SELECTIVE_SCANS):
        names = ("mamba_n_heads", "mamba_d_state", "mamba_d_head", "mamba_n_groups", "mamba_d_conv")
        sizes = [int(size) if isinstance(size := text.get(name), int) else 1 for name in names]
        heads, key, value, groups, width = sizes
        if kind in SELECTIVE_SCANS:
            channels = heads * value
            return MatrixState(channels, max(width, 2) - 1, heads, key, value, channels + 2 * key)
        return MatrixState(heads * value + 2 * groups * key, max(width, 2) - 1, heads, key, value, heads)
    return PagedColumnState(hidden, max(int(text.get("conv_L_cache") or 3), 2) - 1) if kind in STATES else None
