"""EXAONE 4 (LG AI Research, 2025): norms behind attention and the MLP instead of before them; in models with windows,
layers without one leave positions out."""

from __future__ import annotations

from typing import Any

from quire.engine.families.base.config_fields import POST_NORMS
from quire.engine.families.base.family import Family
from quire.engine.families.base.layer_types import sliding_windows
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.ropes import window_only_ropes


def _ropes(config: ModelConfig) -> list[dict[str, Any] | None]:
    has_windows = config.raw.get("sliding_window") is not None
    return window_only_ropes(config) if has_windows else [config.rope] * config.num_layers


EXAONE4 = Family(
    model_types=("exaone4",),
    defaults={"rms_norm_eps": 1e-05, "sliding_window_pattern": 4},
    missing_defaults={"sliding_window": 4096},
    attention={"qk_norm": "heads", "window": sliding_windows, "rope": _ropes, **POST_NORMS},
    mlp=POST_NORMS,
)
