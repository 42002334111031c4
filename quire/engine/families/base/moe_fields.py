from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.moe import MoELayerSpec, SharedExpertSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.common.errors import ModelError
from quire.engine.families.base.config_fields import ConfigReader, SpecFields, field_reader, flag_reader, read_fields
from quire.engine.families.base.model_config import ModelConfig
from quire.kernels.parameters.routing import Routing

_MAX_TOTAL_EXPERTS = 2**16
"""Bounds all layers together, so that a bad config.json cannot make Quire create too many."""

MoEReader = Callable[[ModelConfig, NormSpec], MoELayerSpec]
"""Raises ModelError."""


def _group_score_top_k(config: ModelConfig) -> int:
    return 2 if (config.raw.get("n_group") or 1) > 1 else 1


GROUPED_ROUTING: SpecFields = {
    "score_function": "sigmoid",
    "is_normalized": flag_reader("norm_topk_prob"),
    "normalizer_eps": 1e-20,
    "scale": field_reader("routed_scaling_factor", 1.0),
    "num_groups": field_reader("n_group", 1),
    "top_k_groups": field_reader("topk_group", 1),
    "group_score_top_k": _group_score_top_k,
}
"""DeepSeek-V3 (2024): weights are sigmoids, and groups are ranked by their two best experts."""


def read_expert_count_and_routing(config: ModelConfig, **routing_fields: Any) -> tuple[int, Routing]:
    """`routing_fields` are fields of Routing. Raises ModelError."""
    raw = config.raw
    count, per_token = raw.get("num_local_experts") or raw.get("num_experts"), raw.get("num_experts_per_tok")
    if not count or not per_token:
        missing = "num_experts_per_tok" if count else "num_local_experts"
        raise ModelError(f"model: config.json of a {config.model_type!r} lacks {missing}, needed to build its experts")
    if count * config.num_layers > _MAX_TOTAL_EXPERTS:
        raise ModelError(f"model: config.json: {count} experts in each of {config.num_layers} layers are too many")
    routing = Routing(per_token, **routing_fields)
    if (reason := routing.invalid_reason(count)) is not None:
        fields = "num_experts_per_tok" + (
            ", n_group, topk_group" if routing.top_k_groups > 1 or routing.num_groups > 1 else ""
        )
        raise ModelError(f"model: config.json: {fields}: {reason}")
    return count, routing


def moe_layer_mask(text_fields: Mapping[str, Any], num_layers: int) -> list[bool]:
    if kinds := text_fields.get("mlp_layer_types"):
        return [layer < len(kinds) and kinds[layer] == "sparse" for layer in range(num_layers)]
    if (chosen := text_fields.get("moe_layers")) is not None:
        return [layer in chosen for layer in range(num_layers)]
    every = int(text_fields.get("decoder_sparse_step") or text_fields.get("interleave_moe_layer_step") or 1)
    dense = {*(text_fields.get("mlp_only_layers") or ()), *range(int(text_fields.get("first_k_dense_replace") or 0))}
    end = text_fields.get("moe_layer_end_index")
    last = num_layers - 1 if end in (None, -1) else int(end)
    return [(layer + 1) % every == 0 and layer not in dense and layer <= last for layer in range(num_layers)]


def shared_expert_width(text_fields: Mapping[str, Any]) -> int:
    each, count = (
        text_fields.get("moe_intermediate_size") or text_fields.get("intermediate_size"),
        text_fields.get("n_shared_experts"),
    )
    total = text_fields.get("shared_expert_intermediate_size") or text_fields.get("shared_intermediate_size")
    return int(total or (int(count or 0) * each if isinstance(each, int) else 0))


def expert_intermediate_size(config: ModelConfig) -> int:
    """Raises ModelError."""
    if (inner := config.raw.get("moe_intermediate_size")) is None:
        kind = config.model_type
        raise ModelError(f"model: config.json of a {kind!r} lacks moe_intermediate_size, needed to build its experts")
    return inner


def mlp_intermediate_size(config: ModelConfig) -> int:
    return config.intermediate_size


def shared_expert_reader(
    name: str = "mlp.shared_experts", *, size: ConfigReader | None = None, is_required: bool = False, **fields: Any
) -> ConfigReader:
    """The reader returns None for size 0, unless `is_required`."""

    def read_shared_expert(config: ModelConfig) -> SharedExpertSpec | None:
        width = shared_expert_width(config.raw) if size is None else size(config)
        return SharedExpertSpec(width, name, **read_fields(fields, config)) if width or is_required else None

    return read_shared_expert


def _read_gated_shared_expert(config: ModelConfig) -> SharedExpertSpec:
    width = shared_expert_width(config.raw)
    if not width:
        raise ModelError(f"model: config.json of a {config.model_type!r} lacks shared_expert_intermediate_size")
    return SharedExpertSpec(width, "mlp.shared_expert", gate_name="mlp.shared_expert_gate")


def moe_reader(
    routing: SpecFields | None = None,
    *,
    size: ConfigReader = mlp_intermediate_size,
    shared_expert: ConfigReader | None = None,
    **fields: Any,
) -> MoEReader:
    """`routing` has fields of Routing. By default, weights are the softmax of the chosen scores, as in Mixtral."""

    def read_moe(config: ModelConfig, norm: NormSpec) -> MoELayerSpec:
        shared_spec = None if shared_expert is None else shared_expert(config)
        experts = read_expert_count_and_routing(config, **read_fields(routing or {}, config))
        return MoELayerSpec(*experts, size(config), norm, shared_spec, **read_fields(fields, config))

    return read_moe


def optional_moe_reader(experts: MoEReader) -> Callable[[ModelConfig, NormSpec], MoELayerSpec | None]:
    def read_optional_moe(config: ModelConfig, norm: NormSpec) -> MoELayerSpec | None:
        return experts(config, norm) if any(moe_layer_mask(config.raw, config.num_layers)) else None

    return read_optional_moe


W123_EXPERT_NAMES: SpecFields = {"gate": "w1", "up": "w3", "down": "w2"}
BLOCK_SPARSE_MOE: SpecFields = {"name": "block_sparse_moe", **W123_EXPERT_NAMES}
NORMALIZED_ROUTING: SpecFields = {"is_normalized": flag_reader("norm_topk_prob")}
"""Softmax over all experts."""
GROUPED_MOE = moe_reader(
    GROUPED_ROUTING,
    size=expert_intermediate_size,
    shared_expert=shared_expert_reader(),
    correction="gate.e_score_correction_bias",
)
GATED_SHARED_MOE = moe_reader(
    NORMALIZED_ROUTING, size=expert_intermediate_size, shared_expert=_read_gated_shared_expert
)
"""As in Qwen, the sigmoid of a linear scales the shared expert's output."""


def with_moe_layers(experts: MoELayerSpec, spec: DecoderSpec, config: ModelConfig) -> DecoderSpec:
    sparse = zip(spec.layers, moe_layer_mask(config.raw, config.num_layers), strict=True)
    return replace(spec, layers=tuple((*layer[:-1], experts) if is_sparse else layer for layer, is_sparse in sparse))
