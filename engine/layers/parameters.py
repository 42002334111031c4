"""How checkpoint tensors reach a model: a table of names, each with the shape it must have and where it goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.backend import Backend, Linear


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of the checkpoint, still to come."""

    shape: tuple[int, ...]
    put: Callable[[Tensor], None]
    """Takes the tensor, already of the model's dtype and on its device."""


ParameterTable = dict[str, Parameter]


class FusedLinear:
    """Linears of one input as one matrix product (query, key and value; gate and up).

    Their weights, and biases if they have any, arrive one by one; when the last is there they are joined and packed,
    and the parts dropped, so loading never holds much more than the model.
    """

    def __init__(
        self, backend: Backend, in_features: int, parts: dict[str, int], *, bias: bool, wide: bool = False
    ) -> None:
        """`parts`: checkpoint name, without .weight, to out_features; in the order they are joined."""
        self._backend = backend
        self._in_features = in_features
        self._parts = parts
        self._wide = wide
        self._kinds = ("weight", "bias") if bias else ("weight",)
        self._arrived: dict[str, Tensor] = {}
        self._linear: Linear | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.packed(x)

    @property
    def packed(self) -> Linear:
        assert self._linear is not None, "weights are not loaded"
        return self._linear

    def parameters(self) -> ParameterTable:
        table = {}
        for part, out in self._parts.items():
            for kind in self._kinds:
                shape = (out, self._in_features) if kind == "weight" else (out,)
                table[f"{part}.{kind}"] = Parameter(shape, self._putter(f"{part}.{kind}"))
        return table

    def _putter(self, name: str) -> Callable[[Tensor], None]:
        def put(tensor: Tensor) -> None:
            self._arrived[name] = tensor
            if len(self._arrived) == len(self._parts) * len(self._kinds):
                weight = self._joined("weight")
                bias = self._joined("bias") if "bias" in self._kinds else None
                self._linear = self._backend.pack_linear(weight, bias, wide=self._wide)
                self._arrived.clear()

        return put

    def _joined(self, kind: str) -> Tensor:
        tensors = [self._arrived[f"{part}.{kind}"] for part in self._parts]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
