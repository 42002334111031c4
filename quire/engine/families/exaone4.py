"""EXAONE 4 (LG AI Research, 2025): post-norms instead of pre-norms. In models with windows, full-attention layers have
no RoPE.
"""

from __future__ import annotations

from typing import Any

from quire.engine.families.base import (
    LAYER_MODULES,
    POST_NORM_MODULES,
    POST_NORMS,
    DecoderFamily,
    GGUFFormat,
    ModelConfig,
    sliding_windows,
    window_only_ropes,
)


def _layer_ropes(config: ModelConfig) -> list[dict[str, Any] | None]:
    has_windows = config.raw.get("sliding_window") is not None
    return window_only_ropes(config) if has_windows else [config.rope] * config.num_layers


EXAONE4 = DecoderFamily(
    model_types=("exaone4",),
    defaults={"rms_norm_eps": 1e-05, "sliding_window_pattern": 4},
    missing_defaults={"sliding_window": 4096},
    attention={"qk_norm": "heads", "window": sliding_windows, "rope": _layer_ropes, **POST_NORMS},
    mlp=POST_NORMS,
    gguf=GGUFFormat(
        architectures=("exaone4",),
        layer_modules={**LAYER_MODULES, **POST_NORM_MODULES},
        has_optional_window=True,
    ),
)
