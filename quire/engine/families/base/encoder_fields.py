from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.engine.architecture.encoder import EncoderSpec, parse_encoder_activation
from quire.engine.architecture.pooler_head import HeadLayerSpec
from quire.engine.common.errors import ModelError
from quire.engine.families.base.model_config import ModelConfig


def base_encoder_spec(config: ModelConfig, **fields: Any) -> EncoderSpec:
    """Raises ModelError."""
    defaults: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "head_dim": config.head_dim,
        "eps": config.raw.get("layer_norm_eps") or 1e-12,
        "ropes": (None,) * config.num_layers,
        "windows": (None,) * config.num_layers,
        "activation": parse_encoder_activation(config.raw.get("hidden_act") or "gelu"),
    }
    spec = EncoderSpec(**defaults | fields)
    if spec.gated and spec.activation in ("quick_gelu", "relu"):
        raise ModelError(f"model: hidden_act {spec.activation!r} is not supported in a {config.model_type!r}")
    return spec


def two_layer_classifier_builder(first: str, activation: str, last: str) -> Callable[[int, int], list[HeadLayerSpec]]:
    return lambda hidden, labels: [
        HeadLayerSpec(first, hidden, hidden, activation=activation),
        HeadLayerSpec(last, hidden, labels),
    ]
