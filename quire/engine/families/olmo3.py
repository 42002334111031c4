"""OLMo 3 (OLMo Team, 2025): sliding windows with unscaled RoPE in three of four layers."""

from __future__ import annotations

from quire.engine.families.base import field_reader, ropes_by_window_reader, sliding_windows
from quire.engine.families.olmo2 import OLMO2

OLMO3 = OLMO2.derive(
    "olmo3",
    defaults={"rms_norm_eps": 1e-05, "rope_theta": 500_000.0, "sliding_window_pattern": 4},
    missing_defaults={"sliding_window": 4096},
    attention={
        "window": sliding_windows,
        "rope": ropes_by_window_reader(field_reader("rope_theta", 500_000.0), field_reader("rope_theta", 500_000.0)),
    },
)
