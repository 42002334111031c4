"""How ranks divide a model that transformers' class computes: by the plan that the class has for transformers' own
tensor parallelism (base_model_tp_plan), as far as it is one of linears, experts and numbers of heads.

What a plan leaves whole is whole on every rank, and so is what it divides and gathers again at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from quire.engine.errors import ModelError
from quire.engine.layers.shard import WHOLE_LINEAR, Cut, Shard
from quire.engine.models.adapted.build import body_of, build
from quire.engine.models.adapted.experts import OurExperts
from quire.engine.models.adapted.probe import AdaptedAttention, probe

_CUTS: Mapping[str, Literal["outs", "ins"]] = {"colwise": "outs", "rowwise": "ins"}
_WHOLE = {
    *("replicate", "replicated_with_grad_allreduce", "colwise_gather_output", "rowwise_split_input", "mla_kv_a_proj"),
    *("embedding_rowwise", "embedding_colwise", "all_reduce", "local_params"),
}
"""Kinds whose results are whole on every rank in any case."""
_EXPERTS = {"moe_tp_experts", "packed_colwise", "rowwise"}


@dataclass(frozen=True, slots=True)
class Division:
    """What each rank has a part of, by name."""

    linears: Mapping[str, Literal["outs", "ins"]]
    """Some outputs, or some inputs, whose results are summed."""
    experts: frozenset[str] = frozenset()
    """Modules each of whose experts is divided."""
    heads: frozenset[str] = frozenset()
    """Parameters that have a number for each head."""

    def cut(self, name: str, linear: nn.Linear, shard: Shard) -> Cut:
        """What of a linear this rank has."""
        which = self.linears.get(name)
        if which is None:
            return WHOLE_LINEAR
        return shard.outs(linear.out_features) if which == "outs" else shard.ins(linear.in_features)


UNDIVIDED = Division({})


def division_of(model: PreTrainedModel, ranks: int) -> Division:
    """Of a class's model as it is made. Raises ModelError, with the reason, for one that so many cannot divide."""
    inner, body = body_of(model)
    given = getattr(body.config, "base_model_tp_plan", None) or {}
    plan = {f"{_pattern(inner)}.{name}": str(kind) for name, kind in given.items()}
    made_by = f"transformers' {type(model).__name__}"
    linears: dict[str, Literal["outs", "ins"]] = {}
    experts, heads = set[str](), set[str]()

    def wrong(name: str, why: str) -> ModelError:
        return ModelError(f"{made_by}: {name}: {why}")

    def unserved(name: str, kinds: str) -> ModelError:
        return wrong(name, f"its plan of tensor parallelism ({kinds}) is not served")

    for name, module in model.named_modules():
        kind, own = plan.get(_pattern(name)), dict(module.named_parameters(recurse=False))
        if OurExperts.fits(module):
            kinds = {kind, *(plan.get(_pattern(f"{name}.{each}")) for each in own)} - {None}
            if not kinds <= _EXPERTS:
                raise wrong(
                    name, f"its plan of tensor parallelism ({', '.join(sorted(map(str, kinds)))}) is not served"
                )
            if kinds and OurExperts.width(module) % ranks:
                raise wrong(name, f"{ranks} ranks do not divide {OurExperts.width(module)} numbers of an expert")
            experts |= {name} if kinds else set()
            continue
        if type(module) is nn.Linear and kind is not None and kind in _CUTS:
            size = module.out_features if _CUTS[kind] == "outs" else module.in_features
            if size % ranks:
                raise wrong(name, f"{ranks} ranks do not divide {size} numbers")
            linears[name] = _CUTS[kind]
        elif kind is not None and kind not in _WHOLE:
            raise unserved(name, kind)
        for each, parameter in own.items():
            full = f"{name}.{each}" if name else each
            if (kind := plan.get(_pattern(full))) is None or kind in _WHOLE:
                continue
            if kind not in _CUTS or parameter.ndim != 1 or len(parameter) % ranks:
                raise unserved(full, kind)
            heads.add(full)
    if not linears:
        raise ModelError(f"{made_by} has no plan of tensor parallelism, so ranks cannot divide it")
    return Division(linears, frozenset(experts), frozenset(heads))


def divided_attention(given: Mapping[str, object], longest: int, shard: Shard) -> list[AdaptedAttention]:
    """What a rank's attention keeps, by call, as its part of the class says when it is run without numbers. Raises
    ModelError for a class that does not run so."""
    model = build(given, torch.float32)
    whole = probe(build(given, torch.float32), longest)
    division = division_of(model, shard.count)
    for name in division.linears:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        outs, ins = division.cut(name, linear, shard).sizes(linear.out_features, linear.in_features)
        model.set_submodule(name, nn.Linear(ins, outs, bias=linear.bias is not None, device="meta"))
    for name in division.heads:
        parent, _, own = name.rpartition(".")
        part = len(shard.span(len(model.get_parameter(name))))
        setattr(model.get_submodule(parent), own, nn.Parameter(torch.empty(part, device="meta"), requires_grad=False))
    found = probe(model, longest)
    for own_part, all_of_it in zip(found, whole, strict=True):
        parts = all_of_it.num_heads // own_part.num_heads
        if parts not in (1, shard.count) or own_part.num_kv_heads * parts != all_of_it.num_kv_heads:
            heads = f"{all_of_it.num_heads} heads over {all_of_it.num_kv_heads} of keys"
            raise ModelError(f"transformers' {type(model).__name__}: {shard.count} ranks do not divide {heads}")
    return found


def _pattern(name: str) -> str:
    """As plans name the modules of all layers."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)
