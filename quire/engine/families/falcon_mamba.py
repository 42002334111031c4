"""Falcon Mamba (TII, 2024): Mamba, which norms what steps, b and c are made of."""

from __future__ import annotations

from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.sublayer import SublayerSpec
from quire.engine.families.base.attention_free import attention_free_builder
from quire.engine.families.base.mamba_fields import mamba_spec
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.mamba import MAMBA


def _mamba_spec(config: ModelConfig, norm: NormSpec) -> SublayerSpec:
    return mamba_spec(config, norm, inner_norm="plain", inner_eps=config.raw.get("mixer_rms_eps") or 0.0)


FALCON_MAMBA = MAMBA.derive(
    "falcon_mamba",
    defaults={**MAMBA.defaults, "mixer_rms_eps": 1e-06},
    build=attention_free_builder(_mamba_spec),
)
