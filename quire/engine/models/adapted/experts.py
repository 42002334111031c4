"""Experts of transformers' classes by our linears: each expert's rows are computed by themselves, and a token's
experts are summed in their order, so that nothing depends on the tokens beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.layers.parameters import Parameter, ParameterTable
from quire.engine.layers.schemes import Scheme
from quire.engine.layers.shard import WHOLE, WHOLE_LINEAR, Shard
from quire.kernels.backend import NO_ADAPTERS, Linear


class OurExperts:
    """A module's experts, which its checkpoint stacks: gate_up_proj (or up_proj) and down_proj, [experts, out, in]."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        scheme: Scheme,
        dtype: torch.dtype,
        shard: Shard = WHOLE,
        total: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`shard`: whose part of each expert; `total`: what adds up the ranks' results, where these are parts."""
        self._module: Any = module
        self._shard, self._total = shard, total
        self._name, self._scheme, self._dtype = name, scheme, dtype
        self._first = "gate_up_proj" if module.has_gate else "up_proj"
        self._arrived: dict[str, Tensor] = {}
        self._linears: dict[str, list[Linear]] = {}

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether a module has experts in this form."""
        return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "has_bias", "_apply_gate"))

    @staticmethod
    def width(module: Any) -> int:
        """Numbers between the two matrices of an expert."""
        return int(module.down_proj.shape[1 if module.is_transposed else 2])

    def parameters(self) -> ParameterTable:
        """Takes them out of the module."""
        table: ParameterTable = {}
        for linear in (self._first, "down_proj"):
            names = [linear, *([f"{linear}_bias"] if self._module.has_bias else [])]
            for name in names:
                shape = tuple(getattr(self._module, name).shape)
                table[f"{self._name}.{name}"] = Parameter(shape, self._dtype, self._putter(linear, name, names))
        for name in table:
            delattr(self._module, name.rpartition(".")[2])
        return table

    def _putter(self, linear: str, name: str, names: list[str]) -> Any:
        def put(tensor: Tensor) -> None:
            self._arrived[name] = tensor
            if all(each in self._arrived for each in names):
                tensors = [self._arrived.pop(each) for each in names]
                self._linears[linear] = [
                    self._packed(f"{self._name}.{linear}", *each) for each in zip(*tensors, strict=True)
                ]

        return put

    def _packed(self, name: str, weight: Tensor, bias: Tensor | None = None) -> Linear:
        own = {"weight": weight.t() if self._module.is_transposed else weight}
        own |= {} if bias is None else {"bias": bias}
        if self._shard.count > 1:
            own = {kind: self._part(tensor, kind, name) for kind, tensor in own.items()}
        whole = {kind: tensor.contiguous() for kind, tensor in own.items()}
        return self._scheme.pack({name: whole}, {name: WHOLE_LINEAR}, wide=False)

    def _part(self, tensor: Tensor, kind: str, name: str) -> Tensor:
        """A rank's: of gate and up some outputs of each, of down the inputs that these are."""
        if name.endswith("down_proj"):
            cut = self._shard.ins(tensor.shape[-1])
            return cut.bias(tensor) if kind == "bias" else cut.early(tensor, "all")
        parts = tensor.chunk(2 if self._module.has_gate else 1)
        return torch.cat([each[self._shard.outs(len(each)).outs or range(0)] for each in parts])

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        each = x.new_zeros((*chosen.shape, x.shape[-1]))
        for expert in chosen.unique().tolist():
            if expert < len(self._linears["down_proj"]):
                rows, places = torch.where(chosen == expert)
                each[rows, places] = self._expert(expert, x[rows])
        weighed = each * weights.view(*chosen.shape, 1).to(x.dtype)
        total = weighed[:, 0]
        for place in range(1, chosen.shape[1]):
            total = total + weighed[:, place]
        return total if self._total is None else self._total(total)

    def _expert(self, expert: int, rows: Tensor) -> Tensor:
        inner = self._linears[self._first][expert](rows, NO_ADAPTERS)
        inner = self._module._apply_gate(inner) if self._module.has_gate else self._module.act_fn(inner)
        out = self._linears["down_proj"][expert](inner.contiguous(), NO_ADAPTERS)
        return self._module.post_expert_norm(out) if getattr(self._module, "has_post_expert_norm", False) else out
