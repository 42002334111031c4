"""Each expert computes its rows alone, and a token's experts are summed in order, so results do not depend on other
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.layers.parameters import LoadableParameter, ParameterTable
from quire.engine.layers.schemes import QuantizationScheme
from quire.engine.layers.shard import FULL_LINEAR, UNSHARDED, ModelShard
from quire.kernels.backend import NO_ADAPTERS, Linear


class QuireExperts:
    """Experts with gate_up_proj (or up_proj) and down_proj, [experts, out, in]."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        scheme: QuantizationScheme,
        dtype: torch.dtype,
        shard: ModelShard = UNSHARDED,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._module: Any = module
        self._shard, self._reduce = shard, reduce
        self._name = name
        self._scheme = scheme
        self._dtype = dtype
        self._input_linear = "gate_up_proj" if module.has_gate else "up_proj"
        self._loaded_tensors: dict[str, Tensor] = {}
        self._linears: dict[str, list[Linear]] = {}

    @staticmethod
    def is_experts_module(module: nn.Module) -> bool:
        return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "has_bias", "_apply_gate"))

    @staticmethod
    def intermediate_size_of_module(module: Any) -> int:
        return int(module.down_proj.shape[1 if module.is_transposed else 2])

    def take_parameters_from_module(self) -> ParameterTable:
        table: ParameterTable = {}
        for linear in (self._input_linear, "down_proj"):
            names = [linear, *([f"{linear}_bias"] if self._module.has_bias else [])]
            for name in names:
                shape = tuple(getattr(self._module, name).shape)
                table[f"{self._name}.{name}"] = LoadableParameter(
                    shape, self._dtype, self._make_weight_loader(linear, name, names)
                )
        for name in table:
            delattr(self._module, name.rpartition(".")[2])
        return table

    def _make_weight_loader(self, linear: str, name: str, names: list[str]) -> Any:
        def load_tensor(tensor: Tensor) -> None:
            self._loaded_tensors[name] = tensor
            if all(each in self._loaded_tensors for each in names):
                tensors = [self._loaded_tensors.pop(each) for each in names]
                self._linears[linear] = [
                    self._pack_expert_linear(f"{self._name}.{linear}", *each) for each in zip(*tensors, strict=True)
                ]

        return load_tensor

    def _pack_expert_linear(self, name: str, weight: Tensor, bias: Tensor | None = None) -> Linear:
        tensors = {"weight": weight.t() if self._module.is_transposed else weight}
        tensors |= {} if bias is None else {"bias": bias}
        if self._shard.world_size > 1:
            tensors = {kind: self._slice_expert(tensor, kind, name) for kind, tensor in tensors.items()}
        contiguous = {kind: tensor.contiguous() for kind, tensor in tensors.items()}
        return self._scheme.pack_linears({name: contiguous}, {name: FULL_LINEAR}, wide=False)

    def _slice_expert(self, tensor: Tensor, kind: str, name: str) -> Tensor:
        if name.endswith("down_proj"):
            cut = self._shard.input_slice(tensor.shape[-1])
            return cut.slice_bias(tensor) if kind == "bias" else cut.slice_tensor_on_read(tensor, "all")
        parts = tensor.chunk(2 if self._module.has_gate else 1)
        return torch.cat([each[self._shard.output_slice(len(each)).output_range or range(0)] for each in parts])

    def __call__(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        outputs = x.new_zeros((*expert_ids.shape, x.shape[-1]))
        for expert in expert_ids.unique().tolist():
            if expert < len(self._linears["down_proj"]):
                rows, places = torch.where(expert_ids == expert)
                outputs[rows, places] = self._run_expert(expert, x[rows])
        weighed = outputs * weights.view(*expert_ids.shape, 1).to(x.dtype)
        total = weighed[:, 0]
        for place in range(1, expert_ids.shape[1]):
            total = total + weighed[:, place]
        return total if self._reduce is None else self._reduce(total)

    def _run_expert(self, expert: int, rows: Tensor) -> Tensor:
        inner = self._linears[self._input_linear][expert](rows, NO_ADAPTERS)
        inner = self._module._apply_gate(inner) if self._module.has_gate else self._module.act_fn(inner)
        out = self._linears["down_proj"][expert](inner.contiguous(), NO_ADAPTERS)
        return self._module.post_expert_norm(out) if getattr(self._module, "has_post_expert_norm", False) else out
