from __future__ import annotations

import torch

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.mla import MLALayerSpec
from quire.engine.architecture.recurrent import (
    DeltaNetSpec,
    KimiDeltaAttentionSpec,
    Mamba2LayerSpec,
    MambaLayerSpec,
    MatrixStateSpec,
)
from quire.engine.common.errors import ModelError
from quire.kernels.backend_selection import AttentionRequirements
from quire.kernels.recurrent.delta_rule import DeltaRule
from quire.kernels.recurrent.recurrence import Recurrence
from quire.kernels.recurrent.selective_scan import SelectiveScan
from quire.kernels.recurrent.state_space import StateSpace


def widest_attention_spec(spec: DecoderSpec) -> AttentionLayerSpec | MLALayerSpec:
    """If all states are recurrent, return a spec that any backend computes. Raises ModelError if no layer has a
    state.
    """
    attention_specs: list[AttentionLayerSpec | MLALayerSpec] = [
        *spec.sublayers_of_kind(AttentionLayerSpec),
        *spec.sublayers_of_kind(MLALayerSpec),
    ]
    if not attention_specs and not spec.needs_state_snapshots:
        raise ModelError("model: config.json: layer_types: no layer has attention or a state space")
    return max(
        attention_specs, key=lambda each: each.head_dim, default=AttentionLayerSpec(1, 1, 64, 1.0, None, spec.norm)
    )


def distinct_attention_specs(spec: DecoderSpec) -> list[AttentionLayerSpec] | list[MLALayerSpec]:
    widest_spec = widest_attention_spec(spec)
    if isinstance(widest_spec, MLALayerSpec):
        return [widest_spec]
    parts = spec.sublayers_of_kind(AttentionLayerSpec)
    shapes = {(each.num_heads, each.num_kv_heads, each.head_dim, each.softcap): each for each in parts}
    return list(shapes.values()) or [widest_spec]


def has_sinks(spec: DecoderSpec) -> bool:
    return any(each.sinks for each in spec.sublayers_of_kind(AttentionLayerSpec))


def has_chunked_attention(spec: DecoderSpec) -> bool:
    return any(each.chunked for each in spec.sublayers_of_kind(AttentionLayerSpec))


def has_mla(spec: DecoderSpec) -> bool:
    return bool(spec.sublayers_of_kind(MLALayerSpec))


def attention_head_dim(spec: DecoderSpec, device: torch.device) -> int:
    """For MLA, this is the size of a latent key on CPUs, and of a query on other devices, where MLA has kernels of its
    own.
    """
    widest_spec = widest_attention_spec(spec)
    if isinstance(widest_spec, MLALayerSpec) and device.type != "cpu":
        return widest_spec.qk_nope_head_dim + widest_spec.qk_rope_head_dim
    return widest_spec.head_dim


def make_dummy_recurrence_params(spec: DecoderSpec, device: torch.device) -> list[tuple[Recurrence, int]]:
    """Return (parameters, value_dim) for each kind and size of recurrence in the model."""
    first: dict[tuple[type[MatrixStateSpec], int, int, int], MatrixStateSpec] = {}
    for each in spec.sublayers_of_kind(MatrixStateSpec):  # type: ignore[type-abstract]
        first.setdefault((type(each), each.num_heads, each.key_dim, each.value_dim), each)
    return [(_make_dummy_recurrence_params(each, device), each.value_dim) for each in first.values()]


def _make_dummy_recurrence_params(part: MatrixStateSpec, device: torch.device) -> Recurrence:
    def sample_tensor(*shape: int) -> torch.Tensor:
        return torch.linspace(0.1, 1.0, torch.Size(shape).numel(), device=device).view(shape)

    heads, channels = part.num_heads, part.num_heads * part.value_dim
    if isinstance(part, DeltaNetSpec | KimiDeltaAttentionSpec):
        has_row_decay = isinstance(part, KimiDeltaAttentionSpec)
        key_heads = heads if isinstance(part, KimiDeltaAttentionSpec) else part.num_key_heads
        return DeltaRule(
            -sample_tensor(heads),
            sample_tensor(heads * part.key_dim if has_row_decay else heads),
            sample_tensor(part.value_dim),
            1e-6,
            key_heads,
            part.key_dim,
            has_sigmoid_gate=has_row_decay,
        )
    if isinstance(part, Mamba2LayerSpec):
        norm = None if part.result_norm is None else sample_tensor(channels)
        weights = (
            -sample_tensor(heads),
            sample_tensor(heads),
            sample_tensor(heads),
            norm,
            part.result_eps,
            part.num_groups,
            part.key_dim,
            part.value_dim,
        )
        return StateSpace(*weights, dt_limits=part.dt_limits, norm_before_gate=part.result_norm == "before")
    assert isinstance(part, MambaLayerSpec)
    inner = None if part.inner_norm is None else sample_tensor(part.key_dim)
    rate = -sample_tensor(heads, part.key_dim, part.value_dim)
    return SelectiveScan(rate, sample_tensor(channels), sample_tensor(channels), inner, inner, part.inner_eps)


def attention_requirements(spec: DecoderSpec, kv_dtype: torch.dtype, *, ranks: int = 1) -> AttentionRequirements:
    return AttentionRequirements(
        softcap=widest_attention_spec(spec).softcap is not None,
        sinks=has_sinks(spec),
        latents=has_mla(spec),
        chunks=has_chunked_attention(spec),
        kv_dtype=kv_dtype,
        ranks=ranks,
    )
