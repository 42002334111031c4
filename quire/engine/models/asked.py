"""What a model asks of whoever computes it: of attention, and of what stands in its place."""

from __future__ import annotations

import torch

from quire.engine.errors import ModelError
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.latent_attention import LatentAttentionSpec
from quire.engine.layers.recurrent.delta_net import DeltaNetSpec
from quire.engine.layers.recurrent.selective_scan import SelectiveScanSpec
from quire.engine.layers.recurrent.state_space import StateSpaceSpec
from quire.engine.models.spec import DecoderSpec
from quire.kernels.recurrent.delta_rule import DeltaRule
from quire.kernels.recurrent.recurrence import Recurrence
from quire.kernels.recurrent.selective_scan import SelectiveScan
from quire.kernels.recurrent.state_space import StateSpace

_Part = DeltaNetSpec | StateSpaceSpec | SelectiveScanSpec


def widest(spec: DecoderSpec) -> AttentionSpec | LatentAttentionSpec:
    """The attention that asks most of a backend; of a model that has none, one that any backend computes. Raises
    ModelError where layers keep nothing at all."""
    parts: list[AttentionSpec | LatentAttentionSpec] = [*spec.parts(AttentionSpec), *spec.parts(LatentAttentionSpec)]
    if not parts and not spec.needs_snapshots:
        raise ModelError("model: config.json: layer_types: no layer has attention or a state space")
    return max(parts, key=lambda each: each.head_dim, default=AttentionSpec(1, 1, 64, 1.0, None, spec.norm))


def each_attention(spec: DecoderSpec) -> list[AttentionSpec] | list[LatentAttentionSpec]:
    """One of each shape that layers have, or of latents the widest, where a model has both or some of these alone."""
    part = widest(spec)
    if isinstance(part, LatentAttentionSpec):
        return [part]
    parts = spec.parts(AttentionSpec)
    shapes = {(each.num_heads, each.num_kv_heads, each.head_dim, each.softcap): each for each in parts}
    return list(shapes.values()) or [part]


def has_sinks(spec: DecoderSpec) -> bool:
    """Whether some attention has sinks (gpt-oss)."""
    return any(each.sinks for each in spec.parts(AttentionSpec))


def has_chunks(spec: DecoderSpec) -> bool:
    """Whether some attention is within chunks (Llama 4)."""
    return any(each.chunked for each in spec.parts(AttentionSpec))


def has_latents(spec: DecoderSpec) -> bool:
    return bool(spec.parts(LatentAttentionSpec))


def head_size(spec: DecoderSpec, device: torch.device) -> int:
    """Of the attention that asks most. On a CPU latents are heads of its attention; elsewhere they have kernels of
    their own, and heads are those that may be made of them."""
    part = widest(spec)
    if isinstance(part, LatentAttentionSpec) and device.type != "cpu":
        return part.plain + part.rotated
    return part.head_dim


def sample_rules(spec: DecoderSpec, device: torch.device) -> list[tuple[Recurrence, int]]:
    """A rule of each kind and size that layers compute states by, with some weights, and the numbers of a value."""
    parts: list[_Part] = [*spec.parts(DeltaNetSpec), *spec.parts(StateSpaceSpec), *spec.parts(SelectiveScanSpec)]
    first: dict[tuple[type[_Part], int, int, int], _Part] = {}
    for each in parts:
        first.setdefault((type(each), each.heads, each.key, each.value), each)
    return [(_sample(each, device), each.value) for each in first.values()]


def _sample(part: _Part, device: torch.device) -> Recurrence:
    def some(*shape: int) -> torch.Tensor:
        return torch.linspace(0.1, 1.0, torch.Size(shape).numel(), device=device).view(shape)

    heads, channels = part.heads, part.heads * part.value
    if isinstance(part, DeltaNetSpec):
        return DeltaRule(-some(heads), some(heads), some(part.value), 1e-6, part.key_heads, part.key)
    if isinstance(part, StateSpaceSpec):
        norm = None if part.result_norm is None else some(channels)
        weights = (-some(heads), some(heads), some(heads), norm, part.result_eps, part.groups, part.key, part.value)
        return StateSpace(*weights, limits=part.limits, norm_first=part.result_norm == "before")
    inner = None if part.inner_norm is None else some(part.key)
    rate = -some(heads, part.key, part.value)
    return SelectiveScan(rate, some(channels), some(channels), inner, inner, part.inner_eps)
