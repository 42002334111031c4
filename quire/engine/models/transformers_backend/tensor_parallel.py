"""Tensor parallelism by a class's own plan (base_model_tp_plan)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from quire.engine.common.errors import ModelError
from quire.engine.layers.shard import FULL_LINEAR, LinearSlice, ModelShard
from quire.engine.models.transformers_backend.experts import QuireExperts
from quire.engine.models.transformers_backend.model_builder import build_model, find_body_and_name
from quire.engine.models.transformers_backend.probe import TransformersAttentionSpec, probe_attention

_SLICED_KINDS: Mapping[str, Literal["outs", "ins"]] = {"colwise": "outs", "rowwise": "ins"}
_REPLICATED_KINDS = {
    "replicate",
    "replicated_with_grad_allreduce",
    "colwise_gather_output",
    "rowwise_split_input",
    "mla_kv_a_proj",
    "embedding_rowwise",
    "embedding_colwise",
    "all_reduce",
    "local_params",
}
_EXPERT_KINDS = {"moe_tp_experts", "packed_colwise", "rowwise"}


@dataclass(frozen=True, slots=True)
class TensorParallelPlan:
    linear_kinds: Mapping[str, Literal["outs", "ins"]]
    """By linear name: "outs" shards outputs; "ins" shards inputs, and the ranks' results are summed."""
    expert_modules: frozenset[str] = frozenset()
    per_head_parameters: frozenset[str] = frozenset()

    def linear_slice(self, name: str, linear: nn.Linear, shard: ModelShard) -> LinearSlice:
        which = self.linear_kinds.get(name)
        if which is None:
            return FULL_LINEAR
        return shard.output_slice(linear.out_features) if which == "outs" else shard.input_slice(linear.in_features)


REPLICATED_PLAN = TensorParallelPlan({})


def make_tensor_parallel_plan(model: PreTrainedModel, ranks: int) -> TensorParallelPlan:
    """Raises ModelError."""
    body_name, body = find_body_and_name(model)
    plan_fields = getattr(body.config, "base_model_tp_plan", None) or {}
    plan = {f"{_replace_indices_with_wildcard(body_name)}.{name}": str(kind) for name, kind in plan_fields.items()}
    class_name = f"transformers' {type(model).__name__}"
    linears: dict[str, Literal["outs", "ins"]] = {}
    experts, heads = set[str](), set[str]()

    def plan_error(name: str, why: str) -> ModelError:
        return ModelError(f"{class_name}: {name}: {why}")

    def unsupported_plan_error(name: str, kinds: str) -> ModelError:
        return plan_error(name, f"its tensor-parallel plan ({kinds}) is not served")

    def check_expert_kinds(name: str, module: nn.Module, kinds: set[str | None]) -> None:
        if not kinds <= _EXPERT_KINDS:
            raise unsupported_plan_error(name, ", ".join(sorted(map(str, kinds))))
        if kinds and QuireExperts.intermediate_size_of_module(module) % ranks:
            raise plan_error(
                name,
                f"{ranks} ranks do not divide {QuireExperts.intermediate_size_of_module(module)} numbers of an expert",
            )

    for name, module in model.named_modules():
        kind, parameters = plan.get(_replace_indices_with_wildcard(name)), dict(module.named_parameters(recurse=False))
        if QuireExperts.is_experts_module(module):
            kinds = {kind, *(plan.get(_replace_indices_with_wildcard(f"{name}.{each}")) for each in parameters)} - {
                None
            }
            check_expert_kinds(name, module, kinds)
            if kinds:
                experts.add(name)
            continue
        if type(module) is nn.Linear and kind is not None and kind in _SLICED_KINDS:
            size = module.out_features if _SLICED_KINDS[kind] == "outs" else module.in_features
            if size % ranks:
                raise plan_error(name, f"{ranks} ranks do not divide {size} numbers")
            linears[name] = _SLICED_KINDS[kind]
        elif kind is not None and kind not in _REPLICATED_KINDS:
            raise unsupported_plan_error(name, kind)
        for each, parameter in parameters.items():
            full = f"{name}.{each}" if name else each
            if (kind := plan.get(_replace_indices_with_wildcard(full))) is None or kind in _REPLICATED_KINDS:
                continue
            if kind not in _SLICED_KINDS or parameter.ndim != 1 or len(parameter) % ranks:
                raise unsupported_plan_error(full, kind)
            heads.add(full)
    if not linears:
        raise ModelError(f"{class_name} has no tensor-parallel plan, so ranks cannot divide it")
    return TensorParallelPlan(linears, frozenset(experts), frozenset(heads))


def probe_sharded_attention(
    config_fields: Mapping[str, object], max_len: int, shard: ModelShard
) -> list[TransformersAttentionSpec]:
    """Raises ModelError if the sharded class does not run, or if its heads cannot be divided."""
    model = build_model(config_fields, torch.float32)
    unsharded = probe_attention(build_model(config_fields, torch.float32), max_len)
    plan = make_tensor_parallel_plan(model, shard.world_size)
    for name in plan.linear_kinds:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        outs, ins = plan.linear_slice(name, linear, shard).sliced_sizes(linear.out_features, linear.in_features)
        model.set_submodule(name, nn.Linear(ins, outs, bias=linear.bias is not None, device="meta"))
    for name in plan.per_head_parameters:
        parent, _, own = name.rpartition(".")
        part = len(shard.rank_span(len(model.get_parameter(name))))
        setattr(model.get_submodule(parent), own, nn.Parameter(torch.empty(part, device="meta"), requires_grad=False))
    sharded = probe_attention(model, max_len)
    for shard_attention, full_attention in zip(sharded, unsharded, strict=True):
        parts = full_attention.num_heads // shard_attention.num_heads
        if parts not in (1, shard.world_size) or shard_attention.num_kv_heads * parts != full_attention.num_kv_heads:
            heads = f"{full_attention.num_heads} heads over {full_attention.num_kv_heads} of keys"
            raise ModelError(f"transformers' {type(model).__name__}: {shard.world_size} ranks do not divide {heads}")
    return sharded


def _replace_indices_with_wildcard(name: str) -> str:
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)
