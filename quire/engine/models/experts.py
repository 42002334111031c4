"""What config.json says of experts, in the names of all families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from quire.engine.checkpoint.families import shared_experts, sparse_layers
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.moe import ExpertsSpec, SharedSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.models.spec import DecoderSpec
from quire.engine.models.values import Fields, Read, flag, given, read_all
from quire.kernels.routing import Routing

_MOST = 2**16
"""Experts of all layers together: far more than any real model's, and few enough to be made without their weights."""

Experts = Callable[[ModelConfig, NormSpec], ExpertsSpec]
"""Reads a layer's experts, whose norms are like the model's. Raises ModelError."""


def _group_best(config: ModelConfig) -> int:
    return 2 if (config.raw.get("n_group") or 1) > 1 else 1


GROUPED: Fields = {
    "weights": "sigmoid",
    "normalized": flag("norm_topk_prob"),
    "added": 1e-20,
    "scale": given("routed_scaling_factor", 1.0),
    "groups": given("n_group", 1),
    "groups_kept": given("topk_group", 1),
    "group_best": _group_best,
}
"""DeepSeek-V3's routing (2024): weights are sigmoids, normalized where config.json says so; groups are chosen by their
two best experts."""


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


def expert_size(config: ModelConfig) -> int:
    """The width of an expert. Raises ModelError."""
    if (inner := config.raw.get("moe_intermediate_size")) is None:
        kind = config.model_type
        raise ModelError(f"model: config.json of a {kind!r} lacks moe_intermediate_size, needed to build its experts")
    return inner


def mlp_size(config: ModelConfig) -> int:
    """The width of an expert in families whose experts are as wide as an MLP."""
    return config.intermediate_size


def shared(*, always: bool = False, **fields: Any) -> Read:
    """Reads the MLP that every token has beside its experts, whose other `fields` are those of SharedSpec. It is None
    where a model has none, unless it is `always` there."""

    def read(config: ModelConfig) -> SharedSpec | None:
        name, width = shared_experts(config.raw)
        return SharedSpec(width, name, **read_all(fields, config)) if width or always else None

    return read


def _gated_mlp(config: ModelConfig) -> SharedSpec:
    name, width = shared_experts(config.raw)
    if not width:
        raise ModelError(f"model: config.json of a {config.model_type!r} lacks shared_expert_intermediate_size")
    return SharedSpec(width, name, gate="mlp.shared_expert_gate")


def mixture(
    routing: Fields | None = None, *, size: Read = mlp_size, beside: Read | None = None, **fields: Any
) -> Experts:
    """Reads experts: `routing` are fields of Routing, `size` reads an expert's width and `beside` the MLP beside them;
    `fields` are those of ExpertsSpec."""

    def read(config: ModelConfig, norm: NormSpec) -> ExpertsSpec:
        own = None if beside is None else beside(config)
        experts = routed(config, **read_all(routing or {}, config))
        return ExpertsSpec(*experts, size(config), norm, own, **read_all(fields, config))

    return read


def where_sparse(experts: Experts) -> Callable[[ModelConfig, NormSpec], ExpertsSpec | None]:
    """Reads experts of models that have some: in a small one all layers may be dense."""

    def read(config: ModelConfig, norm: NormSpec) -> ExpertsSpec | None:
        return experts(config, norm) if any(sparse_layers(config.raw, config.num_layers)) else None

    return read


NORMALIZED: Fields = {"normalized": flag("norm_topk_prob")}
"""Weights are divided by their sum where config.json says so."""
GROUPED_EXPERTS = mixture(GROUPED, size=expert_size, beside=shared(), correction="gate.e_score_correction_bias")
"""DeepSeek-V3's, as other families have taken them over."""
GATED_EXPERTS = mixture(NORMALIZED, size=expert_size, beside=_gated_mlp)
"""Those of Qwen2 and of Qwen's later families: the MLP beside them has a gate."""


def in_layers(experts: ExpertsSpec, spec: DecoderSpec, config: ModelConfig) -> DecoderSpec:
    """With these experts in the MLP's place, in the layers that have some."""
    sparse = zip(spec.layers, sparse_layers(config.raw, config.num_layers), strict=True)
    return replace(spec, layers=tuple((*layer[:-1], experts) if has else layer for layer, has in sparse))
