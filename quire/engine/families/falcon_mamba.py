"""Falcon Mamba (TII, 2024): Mamba with norms of the inputs of dt, b and c."""

from __future__ import annotations

from quire.engine.architecture import NormSpec, SublayerSpec
from quire.engine.families.base import (
    LAYER_MODULES,
    MAMBA_GGUF_MODULES,
    MAMBA_GGUF_TENSORS,
    GGUFFormat,
    ModelConfig,
    attention_free_builder,
    mamba_spec,
)
from quire.engine.families.mamba import MAMBA, read_attention_free_gguf_fields


def _mamba_spec(config: ModelConfig, norm: NormSpec) -> SublayerSpec:
    return mamba_spec(config, norm, inner_norm="plain", inner_eps=config.raw.get("mixer_rms_eps") or 0.0)


FALCON_MAMBA = MAMBA.derive(
    "falcon_mamba",
    defaults={**MAMBA.defaults, "mixer_rms_eps": 1e-06},
    build_base_spec=attention_free_builder(_mamba_spec),
    gguf=GGUFFormat(
        architectures=("mamba",),
        layer_modules={**LAYER_MODULES, **MAMBA_GGUF_MODULES},
        matches=lambda metadata: bool(metadata.flag("ssm.dt_b_c_rms")),
        layer_tensors=MAMBA_GGUF_TENSORS,
        read_fields=read_attention_free_gguf_fields,
    ),
)
