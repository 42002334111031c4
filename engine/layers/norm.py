"""The weights of norms: RMSNorms (Zhang and Sennrich, 2019), by the names that a part of a layer gives them, and a
LayerNorm (Ba et al., 2016)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.engine.layers.parameters import Parameter, ParameterTable
from quire.kernels.backend import Operations


@dataclass(frozen=True, slots=True)
class NormSpec:
    """RMSNorms of one part."""

    eps: float
    offset: float = 0.0
    """Added to each weight (1 for Gemma's)."""


class NormWeights:
    """Loaded weights as kernels take them: float32."""

    def __init__(self, names: dict[str, int], dtype: torch.dtype, spec: NormSpec) -> None:
        """`names`: name in the checkpoint to size."""
        self._names = names
        self._dtype = dtype
        self._spec = spec
        self._weights: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor | None:
        """None for a norm that the model does not have."""
        return self._weights[name] if name in self._names else None

    def add(self, run: Operations, name: str, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(the norm of x + residual, x + residual), where there is a stream yet; `run` may overwrite both."""
        if residual is None:
            return run.rms_norm(x, self._weights[name], self._spec.eps), x
        return run.add_rms_norm(x, residual, self._weights[name], self._spec.eps)

    def norm(self, run: Operations, name: str, x: Tensor) -> Tensor:
        """x itself for a norm that the model does not have."""
        return run.rms_norm(x, self._weights[name], self._spec.eps) if name in self._names else x

    def parameters(self) -> ParameterTable:
        def parameter(name: str, size: int) -> Parameter:
            def put(tensor: Tensor) -> None:
                self._weights[name] = tensor.float() + self._spec.offset

            return Parameter((size,), self._dtype, put)

        return {f"{name}.weight": parameter(name, size) for name, size in self._names.items()}


class LayerNormWeights:
    """Loaded weights as kernels take them: float32; the bias is zero where the model has none."""

    def __init__(self, name: str, size: int, *, bias: bool) -> None:
        self._name, self._size = name, size
        self.weight = torch.ones(size)
        self.bias = torch.zeros(size)
        self._has_bias = bias

    def parameters(self) -> ParameterTable:
        def put_weight(tensor: Tensor) -> None:
            self.weight = tensor
            self.bias = self.bias.to(tensor.device)

        def put_bias(tensor: Tensor) -> None:
            self.bias = tensor

        table = {f"{self._name}.weight": Parameter((self._size,), torch.float32, put_weight)}
        if self._has_bias:
            table[f"{self._name}.bias"] = Parameter((self._size,), torch.float32, put_bias)
        return table
