"""Families that keep a state of a sequence as a whole, alone or in most layers: selective state spaces (Mamba 2),
selective scans (Mamba), gated delta nets, short convolutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.recurrent import DeltaNetSpec, ShortConvSpec
from quire.engine.architecture.sublayer import SublayerSpec
from quire.engine.checkpoint.families import STATES, shared_experts
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.families.config_fields import ConfigReader, attention_bias_readers, default_true_reader
from quire.engine.families.dense import ropes_by_window_reader
from quire.engine.families.family import Family, FamilyEntry, FamilySpecBuilder, sliding_windows
from quire.engine.families.moe_fields import moe_reader, optional_moe_reader
from quire.engine.families.recurrent.falcon_h1 import falcon_h1_spec
from quire.engine.families.recurrent.mamba2_fields import mamba2_spec
from quire.engine.families.recurrent.mamba_fields import mamba_spec

SublayerReader = Callable[[ModelConfig, NormSpec], SublayerSpec]


def hybrid_mixers_reader(
    read_sublayer: SublayerReader,
) -> Callable[[ModelConfig, NormSpec], Sequence[SublayerSpec | None]]:
    """Reads in which layers a part stands in attention's place, as Family.mixers."""

    def read_mixers(config: ModelConfig, norm: NormSpec) -> Sequence[SublayerSpec | None]:
        mixer, kinds = read_sublayer(config, norm), STATES[config.model_type]
        return [mixer if kind in kinds else None for kind in config.raw.get("layer_types") or ()]

    return read_mixers


def _attention_free_family(read_sublayer: SublayerReader) -> FamilyEntry:
    """A family of layers that are this part, without attention and without MLPs."""

    def build_family_spec(config: ModelConfig, build_spec: FamilySpecBuilder) -> DecoderSpec:
        norm = NormSpec(config.norm_eps)
        layers = ((read_sublayer(config, norm),),) * config.num_layers
        return DecoderSpec(config.vocab_size, config.hidden_size, layers, norm, tie_embeddings=config.tie_embeddings)

    return build_family_spec


def _falcon_mamba_mixer_spec(config: ModelConfig, norm: NormSpec) -> SublayerSpec:
    return mamba_spec(config, norm, inner_norm="plain", inner_eps=config.raw.get("mixer_rms_eps") or 0.0)


def _jamba_mixer_spec(config: ModelConfig, norm: NormSpec) -> SublayerSpec:
    return mamba_spec(config, norm, inner_norm="learned", inner_eps=config.norm_eps)


def _short_conv_spec(config: ModelConfig, norm: NormSpec) -> ShortConvSpec:
    raw = config.raw
    return ShortConvSpec(config.hidden_size, raw.get("conv_L_cache") or 3, norm, bool(raw.get("conv_bias")))


def _lfm3_spec(config: ModelConfig, build_spec: FamilySpecBuilder) -> DecoderSpec:
    """Norms behind each part too, a gate for each head, and rotations of their own in layers with a window."""
    if config.raw.get("use_sandwich_norm") is False:
        raise ModelError("model: config.json: use_sandwich_norm: an LFM3 without norms behind its parts is not served")
    return _LFM3(config, build_spec)


def _attention_layer_values_reader(values: Callable[[ModelConfig], Sequence[Any]]) -> ConfigReader:
    """Reads for all layers what `values` reads for those with attention; the others have None."""

    def read_by_layer(config: ModelConfig) -> list[Any]:
        attention_values, recurrent_kinds = iter(values(config)), STATES[config.model_type]
        return [
            None if kind in recurrent_kinds else next(attention_values) for kind in config.raw.get("layer_types") or ()
        ]

    return read_by_layer


_LFM3 = Family(
    attention={
        "qk_norm": "heads",
        "window": _attention_layer_values_reader(sliding_windows),
        "rope": _attention_layer_values_reader(
            ropes_by_window_reader(lambda config: 1_000_000.0, lambda config: 10_000.0)
        ),
        "head_gates": default_true_reader("use_attention_gate"),
        "output_norm": True,
        **attention_bias_readers("attention_bias"),
    },
    mlp={"output_norm": True},
    mixers=hybrid_mixers_reader(lambda config, norm: replace(_short_conv_spec(config, norm), output_norm=True)),
)


def _delta_net_spec(config: ModelConfig, norm: NormSpec) -> SublayerSpec:
    raw = config.raw
    key_heads, heads = raw.get("linear_num_key_heads") or 16, raw.get("linear_num_value_heads") or 32
    key, value = raw.get("linear_key_head_dim") or 128, raw.get("linear_value_head_dim") or 128
    if heads % key_heads:
        raise ModelError(f"model: config.json: linear_num_key_heads: {key_heads} do not divide {heads} value heads")
    if key % 2:
        raise ModelError(f"model: config.json: linear_key_head_dim: expected an even number, got {key}")
    if value % 16:
        raise ModelError(f"model: config.json: linear_value_head_dim: expected a multiple of 16, got {value}")
    return DeltaNetSpec(heads, key, value, raw.get("linear_conv_kernel_dim") or 4, norm, key_heads)


def _granite_hybrid_spec(config: ModelConfig, build_spec: FamilySpecBuilder) -> DecoderSpec:
    """Experts beside an MLP, or an MLP alone; with or without positions."""
    name, width = shared_experts(config.raw)
    experts = bool(config.raw.get("num_local_experts"))
    attention: dict[str, Any] = {} if config.raw.get("position_embedding_type") == "rope" else {"rope": None}
    family = Family(
        base="granitemoe" if experts else "granite",
        attention=attention,
        mlp={} if experts else {"name": name, "intermediate_size": width},
        mixers=hybrid_mixers_reader(mamba2_spec),
    )
    return family(config, build_spec)


TABLE: Mapping[str, FamilyEntry] = {
    # LFM2 (Liquid AI, 2025): gated short convolutions in most layers.
    "lfm2": Family(attention={"qk_norm": "heads"}, mixers=hybrid_mixers_reader(_short_conv_spec)),
    # LFM3 (Liquid AI, 2026): wider convolutions, and attention within windows in some layers.
    "lfm3": _lfm3_spec,
    # Qwen3.5's text models (Qwen Team, 2026): gated delta nets in most layers, attention with gates in the others;
    # norms whose weights are offsets from 1.
    "qwen3_5_text": Family(
        norm=lambda config: NormSpec(config.norm_eps, 1.0),
        attention={"qk_norm": "heads", "has_output_gate": True, **attention_bias_readers("attention_bias")},
        mixers=hybrid_mixers_reader(_delta_net_spec),
    ),
    # Bamba (IBM, 2024): a Llama, rotated in part, with state spaces in most layers.
    "bamba": Family(base="llama", mixers=hybrid_mixers_reader(mamba2_spec)),
    # Falcon-H1 (Zuo et al., 2025): attention and a state space side by side in each layer, and factors nearly
    # everywhere.
    "falcon_h1": falcon_h1_spec,
    # Granite 4 (IBM, 2025): Granite with state spaces in most layers.
    "granitemoehybrid": _granite_hybrid_spec,
    # Mamba 2 (Dao and Gu, 2024).
    "mamba2": _attention_free_family(mamba2_spec),
    # Mamba (Gu and Dao, 2023).
    "mamba": _attention_free_family(mamba_spec),
    # Falcon Mamba (TII, 2024), which norms what steps, b and c are made of.
    "falcon_mamba": _attention_free_family(_falcon_mamba_mixer_spec),
    # Jamba (AI21 Labs, 2024): selective scans in most layers, attention without positions in the others, and experts in
    # some MLPs' place, whose weights are not divided by their sum.
    "jamba": Family(
        attention={"rope": None},
        mixers=hybrid_mixers_reader(_jamba_mixer_spec),
        experts=optional_moe_reader(moe_reader({"is_normalized": False}, name="feed_forward", router="router")),
    ),
}
