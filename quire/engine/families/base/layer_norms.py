"""Families with LayerNorms and ungated MLPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.engine.architecture.norm import NormSpec
from quire.engine.common.errors import ModelError
from quire.engine.families.base.activations import hidden_activation
from quire.engine.families.base.config_fields import SpecFields
from quire.engine.families.base.family import DecoderFamily
from quire.engine.families.base.model_config import ModelConfig

PARALLEL_MLP: SpecFields = {"parallel": True, "shares_norm": True}


def layer_norm_reader(*, offset: float = 0.0, bias: bool = True) -> Callable[[ModelConfig], NormSpec]:
    return lambda config: NormSpec(config.norm_eps, offset, is_layer_norm=True, bias=bias)


def layer_norm_family(
    *, bias: Any = True, attention: SpecFields | None = None, mlp: SpecFields | None = None, **family_fields: Any
) -> DecoderFamily:
    return DecoderFamily(
        **{"norm": layer_norm_reader(), **family_fields},
        attention={"qkv_bias": bias, "out_bias": bias, **(attention or {})},
        mlp={"gated": False, "activation": _plain_mlp_activation, "bias": bias, **(mlp or {})},
    )


def _plain_mlp_activation(config: ModelConfig) -> str:
    activation = hidden_activation(config)
    if activation is None or activation == "silu":
        raise ModelError(f"model: hidden_act {activation!r} is not supported in a {config.model_type!r}")
    return activation
