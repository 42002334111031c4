"""What config.json says of experts, in the names of all families."""

from dataclasses import replace
from typing import Any

from quire.engine.checkpoint.families import shared_experts, sparse_layers
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.moe import ExpertsSpec, SharedSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.models.spec import DecoderSpec
from quire.kernels.routing import Routing

_MOST = 2**16
"""Experts of all layers together: far more than any real model's, and few enough to be made without their weights."""


def routed(config: ModelConfig, **rules: Any) -> tuple[int, Routing]:
    """How many experts a layer has, and how a token's are chosen: `rules` are fields of Routing. Raises ModelError."""
    raw = config.raw
    count, per_token = raw.get("num_local_experts") or raw.get("num_experts"), raw.get("num_experts_per_tok")
    if not count or not per_token:
        missing = "num_experts_per_tok" if count else "num_local_experts"
        raise ModelError(f"model: config.json of a {config.model_type!r} lacks {missing}, needed to build its experts")
    if count * config.num_layers > _MOST:
        raise ModelError(f"model: config.json: {count} experts in each of {config.num_layers} layers are too many")
    routing = Routing(per_token, **rules)
    if (reason := routing.impossible(count)) is not None:
        fields = "num_experts_per_tok" + (
            ", n_group, topk_group" if routing.groups_kept > 1 or routing.groups > 1 else ""
        )
        raise ModelError(f"model: config.json: {fields}: {reason}")
    return count, routing


def grouped_experts(config: ModelConfig) -> ExpertsSpec:
    """DeepSeek-V3's (2024), as others have taken them over. Raises ModelError."""
    name, width = shared_experts(config.raw)
    return ExpertsSpec(
        *routed(config, **group_rules(config)),
        expert_size(config),
        NormSpec(config.norm_eps),
        SharedSpec(width, name) if width else None,
        correction="gate.e_score_correction_bias",
    )


def group_rules(config: ModelConfig) -> dict[str, Any]:
    """Of weights that are sigmoids, normalized where config.json says so; groups by their two best experts."""
    raw = config.raw
    groups = raw.get("n_group") or 1
    return {
        "weights": "sigmoid",
        "normalized": bool(raw.get("norm_topk_prob")),
        "added": 1e-20,
        "scale": raw.get("routed_scaling_factor") or 1.0,
        "groups": groups,
        "groups_kept": raw.get("topk_group") or groups,
        "group_best": 2 if groups > 1 else 1,
    }


def expert_size(config: ModelConfig) -> int:
    """The width of an expert. Raises ModelError."""
    if (inner := config.raw.get("moe_intermediate_size")) is None:
        kind = config.model_type
        raise ModelError(f"model: config.json of a {kind!r} lacks moe_intermediate_size, needed to build its experts")
    return inner


def in_layers(experts: ExpertsSpec, spec: DecoderSpec, config: ModelConfig) -> DecoderSpec:
    """With these experts in the MLP's place, in the layers that have some."""
    sparse = zip(spec.layers, sparse_layers(config.raw, config.num_layers), strict=True)
    return replace(spec, layers=tuple((*layer[:-1], experts) if has else layer for layer, has in sparse))
